"""How an engine runs: one frozen record, whose fields are also command-line flags. No torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ..constrained.serving.frames import DEFAULT_GRAMMAR_TIMEOUT_S
from ..constrained.spec import Backend
from ..errors import InvalidProgram, InvalidRequest
from ..flags import Allowed, add_flags, flag, from_flags, integer, misfits, number
from ..frontend.client.progress import ByteProgress
from ..frontend.protocol.kv_policy import ALL_KV, KVPolicy
from ..kernels.kv_cache_dtype import KV_CACHE_DTYPES, KVCacheDtype
from .checkpoint.gguf.shards import model_stem
from .checkpoint.location import EMBEDDED_MODEL, MTP, locate_model
from .memory.disk.block_key import BLOCK_TOKENS
from .schedule.cache.kv_cache import DEFAULT_PIN_SHARE
from .schedule.queue.fairness import tenant_weights
from .schedule.queue.policy import DEFAULT_POLICY, POLICY_NAMES
from .schedule.queue.prompt_limits import DEFAULT_SLOWDOWN
from .speculate.choice import AUTO, DRAFTERS, MAX_DRAFT_TOKENS, MODEL, chosen_drafters

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Quantization = Literal["none", "int8", "w8a8", "int4"]
Role = Literal["both", "prefill", "decode"]
Kernels = Literal["auto", "cpu", "triton", "reference"]
PrefillAttention = Literal["auto", "triton", "torch"]
LOAD_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
ROLES: tuple[Role, ...] = get_args(Role)
KVTransport = Literal["auto", "nixl", "zmq"]
KV_TRANSPORTS: tuple[KVTransport, ...] = get_args(KVTransport)
KERNELS: tuple[Kernels, ...] = get_args(Kernels)
PREFILL_ATTENTIONS: tuple[PrefillAttention, ...] = get_args(PrefillAttention)
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
DEFAULT_MAX_LORA_RANK = 64  # where no adapter is there at the start to tell
MAX_LORA_RANK = 4096

# Tokens of a step that are captured, unless told: past them the device works longer on a step than
# the host takes to launch it (some 350 launches at 8 us, against 11 ms for 512 tokens of an 8B
# model on an H200; counted, not measured).
DEFAULT_GRAPH_MAX_TOKENS = 512
GPU_PAGE_SIZE = 16
MAX_PROCESSES = 62  # that hold a model together: kernels/native/src/communicator.cpp


def _named_path(text: str) -> tuple[str, Path]:
    """ "name=folder"; a folder alone is its own name, as for SGLang."""
    name, separator, folder = text.partition("=")
    return (name, Path(folder)) if separator else (text, Path(text))


REDIS_SCHEMES = ("redis://", "rediss://", "unix://")
MOONCAKE_SCHEME = "mooncake://"
REMOTE_SCHEMES = (*REDIS_SCHEMES, MOONCAKE_SCHEME)  # of a KV store that is not a folder


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told at start. Raises InvalidRequest for values out of range."""

    # fmt: off
    model: Path | str = flag(
        EMBEDDED_MODEL, heading="engine: model", is_common=True, metavar="MODEL",
        help="folder in Hugging Face layout, .gguf file, or hub id as in NAME/MODEL[@REVISION] "
        "(default: the embedded model)",
    )
    revision: str | None = flag(None, "of a hub id: branch, tag or commit", metavar="NAME")
    served_model_name: str | None = flag(
        None, "name shown to clients (default: the model's)", metavar="NAME"
    )
    chat_template: str | None = flag(
        None, metavar="NAME_OR_FILE",
        help="of the checkpoint's chat templates the one to use for everything, or a jinja file "
        "(default: the one named default, with tools the one named tool_use)",
    )
    load_format: LoadFormat = flag(
        "auto", "dummy: random weights of the model's shapes, for benchmarks", choices=LOAD_FORMATS
    )
    quantization: Quantization = flag(
        "none", is_common=True, choices=QUANTIZATIONS,
        help="round weights while they are loaded: to 8 bits, to 8 bits with inputs rounded too, "
        "or to 4 (default: %(default)s; a quantized checkpoint says it itself)",
    )
    # auto: bfloat16 where the device computes in it, else float32
    dtype: str = flag("auto", "arithmetic", is_common=True, choices=DTYPES)
    max_model_len: int | None = flag(
        None, "context length (default: the model's)", integer(2, 1 << 24), is_common=True
    )

    device: str = flag(
        "cpu", "where to compute: cpu, cuda or cuda:N",
        Allowed("cpu, cuda or cuda:N", re.compile(r"cpu|cuda(:\d{1,2})?").fullmatch),
        heading="engine: where and how it computes", is_common=True, metavar="DEVICE",
    )
    kernels: Kernels = flag(
        "auto", choices=KERNELS,
        help="the fastest there, torch calls only, a GPU's own or an error, or the plain reference",
    )
    prefill_attention: PrefillAttention = flag(
        "auto", choices=PREFILL_ATTENTIONS,
        help="of long prompts on a GPU by our kernels, by torch's (cuDNN, FlashAttention), or by "
        "the faster ones, measured when the model is loaded (default: %(default)s)",
    )
    deterministic: bool = flag(
        False, "compute a request to the same bits whatever runs beside it, is cached or computed "
        "in chunks; on a CPU with the compiled kernels",
    )
    cuda_graph_max_tokens: int = flag(
        DEFAULT_GRAPH_MAX_TOKENS, "capture steps of up to N tokens on a GPU; 0: none",
        integer(0, 1 << 20),
    )
    disable_overlap: bool = flag(
        False, "plan no step while a device computes the one before (the output is the same)"
    )
    num_threads: int | None = flag(
        None, "compute threads (default: all cores; one for a small model)", integer(1, 1024)
    )
    spin_us: int | None = flag(
        None, "microseconds that an idle compute thread spins before it sleeps",
        integer(0, 10_000_000), metavar="US",
    )

    tp_size: int = flag(
        1, "processes that hold the model together, each with a part of its weights and its KV "
        "(tensor parallelism; default: %(default)s)", integer(1, MAX_PROCESSES), metavar="N",
        is_common=True,
    )

    ep_size: int = flag(
        1, "groups of these, or of those of --cp-size, that have other experts of a mixture each, "
        "rather than a part of every expert or all (expert parallelism; default: %(default)s)",
        integer(1, MAX_PROCESSES), metavar="N",
    )
    ep_loads: Path | None = flag(
        None, metavar="FILE",
        help="place experts so that groups have equally much to do by what was counted: the JSON "
        "that /server_info gave (default: each group a range of experts)",
    )
    ep_extra_experts: int = flag(
        0, "copies of experts that many tokens choose, in each group beyond its part (default: "
        "%(default)s)", integer(0, 1024), metavar="N",
    )

    pp_size: int = flag(
        1, "processes that hold the model's layers one behind the other, each a part of them "
        "(pipeline parallelism; with --tp-size and --cp-size each part is held by so many; "
        "default: %(default)s)",
        integer(1, MAX_PROCESSES), metavar="N",
    )

    cp_size: int = flag(
        1, "processes that divide the tokens of a step and the KV, each with all weights, or with "
        "--tp-size each so many (context parallelism; default: %(default)s)",
        integer(1, MAX_PROCESSES), metavar="N",
    )

    kv_cache_dtype: KVCacheDtype = flag(
        "auto", "KV as the arithmetic is, in 8 bits, which takes half of the memory, or in 4 (on a "
        "CPU), which takes less than a third",
        heading="engine: KV cache", is_common=True, choices=KV_CACHE_DTYPES,
    )
    kv_policy: str | None = flag(
        None, "keep only a part of each prompt's KV, unless a call says otherwise: snapkv:0.25 or "
        "streaming:1024 (a share, or tokens); outputs differ from those with all of it (CPU). "
        "none: keep also what no layer sees any more, of a model whose layers all see windows",
        metavar="KIND:KEEP",
    )
    page_size: int | None = flag(
        None, f"tokens a KV page (default: 1; on a GPU {GPU_PAGE_SIZE}, unless layers are "
        "recurrent)",
        integer(1, 256),
    )
    mem_fraction: float | None = flag(
        None, "share of the available memory for KV (default: the device's)",
        Allowed("a number in (0, 0.95]", lambda share: 0.0 < share <= 0.95),
        is_common=True, metavar="F",
    )
    max_total_tokens: int | None = flag(
        None, "KV pool size in tokens instead", integer(2, 1 << 31), is_common=True
    )
    disable_leases: bool = flag(
        False, "keep cached KV by last use only, whatever programs know or say"
    )
    pin_share: float = flag(
        DEFAULT_PIN_SHARE, "share of the KV pool that pins may take", number(0, 1), metavar="F"
    )
    state_checkpoints: int | None = flag(
        None, "of a model with recurrent layers: states of prefixes to keep (default: as much "
        "memory as KV takes)", integer(0, 1 << 20),
    )
    state_interval: int | None = flag(
        None, "tokens of a prompt between two of these (default: by a state's size)",
        integer(16, 1 << 20),
    )
    host_kv_tokens: int = flag(
        0, "tokens of KV to keep in host memory when the pool is full (default: none); recurrent "
        "states take as much beside it",
        integer(0, 1 << 31),
    )
    kv_store: str | Path | None = flag(
        None, "folder that keeps the KV of prefixes, also over a restart, or redis://HOST:PORT/DB "
        "or mooncake://HOST:PORT for all engines that know it", metavar="WHERE",
    )
    kv_store_gb: float = flag(
        4.0, "largest size of the folder, with recurrent states (default: %(default)s)",
        Allowed("a number in [0.001, 1000000]", lambda size: 0.001 <= size <= 1e6), metavar="GB",
    )

    max_running_requests: int = flag(
        128, "requests in a batch", integer(1, 65_536), heading="engine: batches", is_common=True
    )
    chunked_prefill_size: int = flag(2048, "token budget of a step", integer(1, 1 << 20))
    schedule_policy: str = flag(
        DEFAULT_POLICY, "which waiting request is admitted next",
        is_common=True, choices=POLICY_NAMES,
    )
    tenant_weights: str = flag(
        "", "shares of the engine between tenants that have work (default: 1 each)",
        metavar="NAME=W,...",
    )
    decode_slowdown: float = flag(
        DEFAULT_SLOWDOWN,
        "while a long prompt is computed, steps of requests that decode may take F times as long; "
        "0: no limit",
        Allowed("0 or a number in [1, 1000]", lambda times: times == 0 or 1 <= times <= 1000),
        metavar="F",
    )

    role: Role = flag(
        "both", choices=ROLES, heading="engine: prefill and decode apart",
        help="compute long prompts for other engines, have these compute one's own, or both, each "
        "where the two flags below say with whom (default: %(default)s)",
    )
    prefill_endpoint: str | None = flag(
        None, "where other engines of this host ask this one to compute prompts: ipc://PATH or "
        "tcp://127.0.0.1:PORT", metavar="ADDRESS",
    )
    prefill_engines: Sequence[str] = flag(
        (), nargs="+", metavar="ADDRESS",
        help="prefill endpoints of other engines, which compute long prompts for this one",
    )
    kv_transport: KVTransport = flag(
        "auto", choices=KV_TRANSPORTS,
        help="how such a prompt's KV comes: auto, into memory that both engines see, where there "
        "is such memory; nixl, written by NIXL, if both engines name it; else, and with zmq, in "
        "messages (default: %(default)s)",
    )

    speculate: str = flag(
        AUTO, metavar="LIST", heading="engine: speculation",
        help="what guesses the next tokens, to verify several in a step (the output is the same): "
        f"some of {', '.join(DRAFTERS)}, with commas between them; auto: the engine's choice; "
        "off: nothing (default: %(default)s)",
    )
    speculative_num_tokens: int = flag(
        8, "guess at most N tokens of a request in a step; 0: none", integer(0, MAX_DRAFT_TOKENS)
    )
    draft_model: str | None = flag(
        None, "a smaller model of the same tokens, or a head (EAGLE, EAGLE-3, Medusa), which "
        "guesses what follows; mtp: the checkpoint's own layer for multi-token prediction (CPU)",
        metavar="PATH",
    )
    draft_quantization: Quantization = flag(
        "none", "quantize the draft model's weights as it is loaded; with the model's own PATH as "
        "--draft-model, a part of its bytes guesses for all of them", choices=QUANTIZATIONS,
    )
    draft_layers: int = flag(
        0, "the model's first N layers guess what follows, with the KV that they have (CPU)",
        integer(0, 1024),
    )
    draft_candidates: int = flag(
        0, "so many tokens beside each that a draft guesses, in whose place they may be right: "
        "trees are verified where that pays (CPU, --page-size 1)",
        integer(0, 8),
    )

    disable_ahead: bool = flag(
        False, "do nothing before a program asks for it: tell no likely outputs, by which pure "
        "tools start early, and prefill no likely texts while the device idles",
        heading="engine: ahead of programs",
    )

    disable_jump_forward: bool = flag(
        False, "compute tokens that a grammar forces one by one (the output is the same)",
        heading="engine: grammars",
    )
    grammar_backend: Backend = flag(
        "stemma", "whose compiler grammars go to; the others take less: docs/use/grammars.md",
        choices=get_args(Backend),
    )
    grammar_cache: Path | None = flag(
        None, "keep what takes long to compile there between runs; the folder is its user's alone "
        "(default: nowhere)", metavar="FOLDER",
    )
    grammar_timeout: float = flag(
        DEFAULT_GRAMMAR_TIMEOUT_S,
        "seconds of CPU time that compiling a grammar may take (default: %(default)s)",
        number(0.1, 600), metavar="S",
    )

    max_images: int = flag(
        32, "images in a prompt, of a model that reads them (default: %(default)s)",
        integer(1, 65_536), heading="engine: images",
    )
    max_image_pixels: int = flag(
        50_000_000, "pixels of an image before it is resized (default: %(default)s)",
        integer(1, 1 << 28), metavar="N",
    )
    image_cache_mb: int = flag(
        256, "memory for what images were encoded to (default: %(default)s)",
        integer(1, 1 << 20), metavar="MB",
    )

    enable_lora: bool = flag(
        False, "serve LoRA adapters, also those that are loaded while it runs",
        heading="engine: LoRA adapters",
    )
    lora_paths: Sequence[tuple[str, Path]] = flag(
        (), type=_named_path, nargs="+", metavar="NAME=FOLDER",
        help="LoRA adapters (Hugging Face PEFT) that are there from the start; FOLDER alone has "
        "its path for a name",
    )
    lora_root: Path | None = flag(
        None, metavar="FOLDER",
        help="load adapters while it runs from within this folder only (default: from anywhere)",
    )
    max_loras_per_batch: int = flag(
        8, "adapters on the device, and so in one step", integer(1, 1024)
    )
    max_loaded_loras: int | None = flag(
        None, "adapters known by name at a time (default: any number)", integer(1, 1 << 20)
    )
    max_lora_rank: int | None = flag(
        None, "largest rank of an adapter (default: that of --lora-paths, or "
        f"{DEFAULT_MAX_LORA_RANK} without any)",
        integer(1, MAX_LORA_RANK), metavar="R",
    )
    # fmt: on

    def __post_init__(self) -> None:
        for misfit in misfits(self):
            raise InvalidRequest.of(*misfit)
        tenant_weights(self.tenant_weights)
        if self.kv_policy not in (None, ALL_KV):
            try:
                KVPolicy.from_text(self.kv_policy)
            except InvalidProgram as error:
                raise InvalidRequest(str(error), "kv_policy") from None
        self._check_drafts()
        if self.device == "cpu":
            fits = self.kernels != "triton"
            _require("kernels", self.kernels, fits, "another with device=cpu")
            asked = self.prefill_attention
            _require("prefill_attention", asked, asked == "auto", "auto with device=cpu")
        name = "cp_size" if self.cp_size > 1 else "tp_size"
        num_sharing = getattr(self, name)
        fits = num_sharing % self.ep_size == 0
        _require("ep_size", self.ep_size, fits, f"a divisor of {name}={num_sharing}")
        fits = self.ep_loads is None or (self.ep_size > 1 and self.pp_size == 1)
        _require("ep_loads", str(self.ep_loads), fits, "none with ep_size=1 or pp_size > 1")
        fits = self.ep_extra_experts == 0 or self.ep_loads is not None
        _require("ep_extra_experts", self.ep_extra_experts, fits, "0 without ep_loads")
        if self.kv_store is not None:
            self._require_whole_kv("kv_store")
        num_before = 1
        for name in ("tp_size", "cp_size", "pp_size"):
            size: int = getattr(self, name)
            most_here = MAX_PROCESSES // num_before
            allowed = f"at most {most_here} here: {MAX_PROCESSES} processes in all"
            _require(name, size, size <= most_here, allowed)
            num_before *= size
        if self.pp_size > 1:
            _require("pp_size", self.pp_size, not self.has_lora, "1 with adapters: use tp_size")
        if self.cp_size > 1:
            _require("cp_size", self.cp_size, self.device == "cpu", "1 with a GPU")
            _require("cp_size", self.cp_size, not self.deterministic, "1 with deterministic")
        if self.deterministic:
            _require("deterministic", True, self.device == "cpu", "false on a GPU")
            _require("kernels", self.kernels, self.kernels == "auto", "auto with deterministic")
            fits = self.dtype not in ("float16", "float64")
            _require("dtype", self.dtype, fits, "auto, bfloat16 or float32 with deterministic")
        page_size = self.tokens_a_page
        fits = self.host_kv_tokens == 0 or self.host_kv_tokens >= page_size
        _require("host_kv_tokens", self.host_kv_tokens, fits, f"0 or >= page_size={page_size}")
        if self.kv_store is not None:
            fits = BLOCK_TOKENS % page_size == 0
            _require("page_size", page_size, fits, f"a divisor of {BLOCK_TOKENS}: kv_store")
            # Blocks are filed under the checkpoint, which these weights are not.
            is_real = self.load_format != "dummy"
            _require("load_format", self.load_format, is_real, "any but dummy with kv_store")
        self._check_prefills()
        most, names = self.max_loaded_loras, [name for name, _ in self.lora_paths]
        fits = len(set(names)) == len(names)
        _require("lora_paths", names, fits, "a different name for each")
        fits = most is None or most >= len(names)
        _require("max_loaded_loras", most, fits, f"at least the {len(names)} of lora_paths")
        fits = self.chunked_prefill_size >= page_size
        allowed = f">= page_size={page_size}"
        _require("chunked_prefill_size", self.chunked_prefill_size, fits, allowed)

    @property
    def tokens_a_page(self) -> int:
        """`page_size`, or what is best for the device: docs/decisions/0007-page-size-1.md."""
        if self.page_size is not None:
            return self.page_size
        return 1 if self.device == "cpu" else GPU_PAGE_SIZE

    def for_model(self, *, has_states: bool) -> EngineConfig:
        """With the page size for a model, which has recurrent layers or none: their states are kept
        at edges of pages only."""
        if self.page_size is None and has_states:
            return replace(self, page_size=1)
        return self

    @property
    def has_draft_model(self) -> bool:
        """Whether a model guesses: another one, or its own first layers."""
        return self.draft_model is not None or self.draft_layers > 0

    def _check_drafts(self) -> None:
        """Raises InvalidRequest."""
        names = chosen_drafters(self.speculate)
        if names is not None and (MODEL in names) != self.has_draft_model:
            allowed = f"auto, or {MODEL} among others: draft_model or draft_layers is set"
            if not self.has_draft_model:
                allowed = f"something without {MODEL}, unless draft_model or draft_layers is set"
            raise InvalidRequest.of("speculate", self.speculate, allowed)
        if not self.has_draft_model:
            fits = self.draft_quantization == "none"
            _require(
                "draft_quantization", self.draft_quantization, fits, "none without draft_model"
            )
            return
        fits = self.draft_model != ""
        _require("draft_model", self.draft_model, fits, "a checkpoint's PATH, mtp, or left out")
        name = "draft_layers" if self.draft_model is None else "draft_model"
        value = getattr(self, name)
        fits = self.draft_model is None or self.draft_layers == 0
        _require("draft_layers", self.draft_layers, fits, "0 with draft_model")
        fits = self.draft_model not in (None, MTP) or self.draft_quantization == "none"
        _require("draft_quantization", self.draft_quantization, fits, "none without draft_model")
        fits = self.speculative_num_tokens > 0
        _require("speculative_num_tokens", 0, fits, f"at least 1 with {name}")
        _require(name, value, self.device == "cpu", "none but with device=cpu")
        _require(name, value, self.num_processes == 1, f"none with {self._divided}")

    def _require_whole_kv(self, field: str) -> None:
        """Raises InvalidRequest where KV cannot leave the engine, or enter it: its process joins
        what others have."""
        value, fits = getattr(self, field), self.num_processes == 1 or self.device == "cpu"
        _require(field, value, fits, f"none with {self._divided} but with device=cpu")

    def _check_prefills(self) -> None:
        """Raises InvalidRequest."""
        named = {"prefill_endpoint": self.prefill_endpoint, "prefill_engines": self.prefill_engines}
        for field, value in named.items():
            if value:
                _require(field, value, self.device == "cpu", "none but with device=cpu")
                self._require_whole_kv(field)
                is_real = self.load_format != "dummy"
                _require("load_format", self.load_format, is_real, f"any but dummy with {field}")
                page_size = self.tokens_a_page
                fits = BLOCK_TOKENS % page_size == 0
                _require("page_size", page_size, fits, f"a divisor of {BLOCK_TOKENS}: {field}")
        for field, endpoints in (
            ("prefill_endpoint", [self.prefill_endpoint] if self.prefill_endpoint else []),
            ("prefill_engines", self.prefill_engines),
        ):
            for endpoint in endpoints:
                from ..frontend.protocol.keys import is_local  # it needs ZeroMQ, which plans do not

                fits = is_local(endpoint) and endpoint.partition("://")[2] != ""
                allowed = "ipc://PATH or tcp://127.0.0.1:PORT: an address of this host"
                _require(field, endpoint, fits, allowed)
        fits = self.role != "prefill" or self.prefill_endpoint is not None
        _require("role", self.role, fits, "decode or both without prefill_endpoint")

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        if self.served_model_name:
            return self.served_model_name
        if os.path.isdir(self.model):
            return Path(self.model).resolve().name
        name = str(self.model)
        name = name if os.path.exists(name) else name.partition("@")[0]
        return model_stem(name.rpartition("/")[2])

    @property
    def has_lora(self) -> bool:
        """Whether adapters are served."""
        return self.enable_lora or bool(self.lora_paths)

    @property
    def num_processes(self) -> int:
        """That hold the model together."""
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def _divided(self) -> str:
        sizes = ("tp_size", "cp_size", "pp_size")
        return " and ".join(f"{size} > 1" for size in sizes if getattr(self, size) > 1)


def add_engine_flags(parser: argparse.ArgumentParser, **changed: Mapping[str, Any]) -> None:
    """The flags of every command that starts an engine, under the field's names. `changed`: by
    field argparse's options in which this command differs."""
    add_flags(parser, EngineConfig, **changed)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The record from parsed flags."""
    return from_flags(EngineConfig, args)


def options_of(config: EngineConfig) -> dict[str, Any]:
    """What differs from the defaults, as `st.Engine` takes it."""
    default = EngineConfig()
    values = {
        name: getattr(config, name)
        for name in EngineConfig.__dataclass_fields__
        if getattr(config, name) != getattr(default, name)
    }
    if config.lora_paths:
        values["lora_paths"] = dict(config.lora_paths)
    return values


def _require(field: str, value: object, is_fine: bool, allowed: str) -> None:
    if not is_fine:
        raise InvalidRequest.of(field, value, allowed)


def located(config: EngineConfig, on_progress: ByteProgress | None = None) -> EngineConfig:
    """The configuration with the model's folder in place of what was typed; the name under which
    it is served stays. Raises as `locate_model` does."""
    folder = locate_model(config.model, revision=config.revision, on_progress=on_progress)
    if config.draft_model not in (None, MTP):
        draft = locate_model(config.draft_model, on_progress=on_progress)
        config = replace(config, draft_model=str(draft))
    if folder == config.model:
        return config
    return replace(config, model=folder, revision=None, served_model_name=config.model_name)
