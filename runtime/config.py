"""How an engine runs: one frozen record, and the command-line flags that fill it. No torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..constrained.serving.compiler_service import DEFAULT_GRAMMAR_TIMEOUT_S
from ..errors import InvalidRequest
from ..kernels.kv_cache_dtype import KV_CACHE_DTYPES, KVCacheDtype
from .checkpoint.gguf.shard_names import model_stem
from .checkpoint.location import EMBEDDED_MODEL, locate_model
from .checkpoint.progress import ByteProgress
from .memory.disk.block_key import BLOCK_TOKENS
from .schedule.cache.kv_cache import DEFAULT_PIN_SHARE
from .schedule.queue.fairness import tenant_weights
from .schedule.queue.policy import DEFAULT_POLICY, POLICY_NAMES, policy_of
from .schedule.queue.prompt_limits import DEFAULT_SLOWDOWN

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
QUANTIZATIONS = ("none", "int8", "w8a8", "int4")
KERNELS = ("auto", "cpu", "triton", "reference")
DEFAULT_MAX_LORA_RANK = 64  # where no adapter is there at the start to tell
MAX_LORA_RANK = 4096
DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")


# Tokens of a step that are captured, unless told: past them the device works longer on a step than
# the host takes to launch it (some 350 launches at 8 us, against 11 ms for 512 tokens of an 8B
# model on an H200; counted, not measured).
DEFAULT_GRAPH_MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told at start. Raises InvalidRequest for values out of range."""

    model: Path | str = EMBEDDED_MODEL  # folder, .gguf file or hub id, see model_location
    revision: str | None = None  # of a hub id: branch, tag or commit; None: the newest
    served_model_name: str | None = None  # None: the folder's, the file's or the hub's
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"  # dummy: random weights
    quantization: Literal["none", "int8", "w8a8", "int4"] = "none"  # of floating weights, at load
    dtype: str = "auto"  # auto: bfloat16 where the device computes in it, else float32
    device: str = "cpu"  # or cuda, cuda:N
    kernels: Literal["auto", "cpu", "triton", "reference"] = "auto"  # auto: the fastest there
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: as dtype
    cuda_graph_max_tokens: int = DEFAULT_GRAPH_MAX_TOKENS  # of a step that is captured; 0: none
    max_model_len: int | None = None  # None: what the model was made for
    page_size: int = 1  # tokens
    mem_fraction: float | None = None  # of the memory available, for KV; None: the device's default
    max_total_tokens: int | None = None  # tokens of KV; wins over mem_fraction
    chunked_prefill_size: int = 2048  # token budget of a step
    max_running_requests: int = 128
    schedule_policy: str = DEFAULT_POLICY  # which waiting request is admitted next
    tenant_weights: str = ""  # shares of the engine, as in "a=2,b=1"; 1 for all others
    decode_slowdown: float = (
        DEFAULT_SLOWDOWN  # beside a long prompt, see schedule/queue/prompt_limits.py
    )
    disable_leases: bool = False  # neither derive what programs will use again, nor be told
    pin_share: float = DEFAULT_PIN_SHARE  # of the KV pool that pins may take
    host_kv_tokens: int = 0  # tokens of KV in host memory, behind the device's; 0: none
    kv_store: Path | None = None  # folder that keeps prefixes over restarts
    kv_store_gb: float = 4.0  # at most, in 10^9 bytes
    disable_overlap: bool = False  # plan a step only when the one before is done
    disable_jump_forward: bool = False  # compute what a grammar forces token by token
    grammar_timeout: float = DEFAULT_GRAMMAR_TIMEOUT_S  # seconds that compiling one may take
    enable_lora: bool = False  # serve adapters; implied by lora_paths
    lora_paths: Sequence[tuple[str, Path]] = ()  # adapters that are there from the start, by name
    lora_root: Path | None = None  # adapters may be loaded from within only; None: from anywhere
    max_loras_per_batch: int = 8  # adapters on the device, and so in one step
    max_loaded_loras: int | None = None  # known by name at a time; None: any number
    max_lora_rank: int | None = None  # None: the largest of lora_paths, or 64 without any
    num_threads: int | None = None  # None: all cores, one for a small model
    spin_us: int | None = None  # how long an idle worker thread spins before it sleeps

    def __post_init__(self) -> None:
        _require("dtype", self.dtype, self.dtype in DTYPES, f"one of {DTYPES}")
        is_device = re.fullmatch(r"cpu|cuda(:\d{1,2})?", self.device) is not None
        _require("device", self.device, is_device, "cpu, cuda or cuda:N")
        is_known = self.load_format in LOAD_FORMATS
        _require("load_format", self.load_format, is_known, f"one of {LOAD_FORMATS}")
        is_known = self.quantization in QUANTIZATIONS
        _require("quantization", self.quantization, is_known, f"one of {QUANTIZATIONS}")
        _require("kernels", self.kernels, self.kernels in KERNELS, f"one of {KERNELS}")
        is_known = self.kv_cache_dtype in KV_CACHE_DTYPES
        _require("kv_cache_dtype", self.kv_cache_dtype, is_known, f"one of {KV_CACHE_DTYPES}")
        if self.device == "cpu":
            fits = self.kernels != "triton"
            _require("kernels", self.kernels, fits, "another with device=cpu")
        _require_range("cuda_graph_max_tokens", self.cuda_graph_max_tokens, 0, 1 << 20)
        policy_of(self.schedule_policy)
        tenant_weights(self.tenant_weights)
        _require_range("page_size", self.page_size, 1, 256)
        _require_range("chunked_prefill_size", self.chunked_prefill_size, 1, 1 << 20)
        _require_range("max_running_requests", self.max_running_requests, 1, 65_536)
        _require_range("max_model_len", self.max_model_len, 2, 1 << 24)
        _require_range("max_total_tokens", self.max_total_tokens, 2, 1 << 31)
        _require_range("num_threads", self.num_threads, 1, 1024)
        _require_range("spin_us", self.spin_us, 0, 10_000_000)
        _require_range("host_kv_tokens", self.host_kv_tokens, 0, 1 << 31)
        fits = self.host_kv_tokens == 0 or self.host_kv_tokens >= self.page_size
        _require("host_kv_tokens", self.host_kv_tokens, fits, "0 or >= page_size")
        if self.kv_store is not None:
            fits = BLOCK_TOKENS % self.page_size == 0
            _require("page_size", self.page_size, fits, f"a divisor of {BLOCK_TOKENS}: kv_store")
            # Blocks are filed under the checkpoint, which these weights are not.
            is_real = self.load_format != "dummy"
            _require("load_format", self.load_format, is_real, "any but dummy with kv_store")
        _require_range("max_loras_per_batch", self.max_loras_per_batch, 1, 1024)
        _require_range("max_loaded_loras", self.max_loaded_loras, 1, 1 << 20)
        _require_range("max_lora_rank", self.max_lora_rank, 1, MAX_LORA_RANK)
        most, names = self.max_loaded_loras, [name for name, _ in self.lora_paths]
        fits = len(set(names)) == len(names)
        _require("lora_paths", names, fits, "a different name for each")
        fits = most is None or most >= len(names)
        _require("max_loaded_loras", most, fits, f"at least the {len(names)} of lora_paths")
        share, size = self.pin_share, self.kv_store_gb
        _require("pin_share", share, 0.0 <= share <= 1.0, "a number in [0, 1]")
        _require("kv_store_gb", size, 0.001 <= size <= 1e6, "a number in [0.001, 1000000]")
        slowdown = self.decode_slowdown
        fits = slowdown == 0 or 1.0 <= slowdown <= 1000.0
        _require("decode_slowdown", slowdown, fits, "0 or a number in [1, 1000]")
        timeout = self.grammar_timeout
        _require("grammar_timeout", timeout, 0.1 <= timeout <= 600.0, "a number in [0.1, 600]")
        fraction = self.mem_fraction
        fits = fraction is None or 0.0 < fraction <= 0.95
        _require("mem_fraction", fraction, fits, "a number in (0, 0.95]")
        fits = self.chunked_prefill_size >= self.page_size
        _require("chunked_prefill_size", self.chunked_prefill_size, fits, ">= page_size")

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


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every command that starts an engine, under the field's names."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--model",
        default=EMBEDDED_MODEL,
        metavar="MODEL",
        help="folder in Hugging Face layout, .gguf file, or hub id as in NAME/MODEL[@REVISION] "
        "(default: the embedded model)",
    )
    add("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    add("--served-model-name", metavar="NAME", help="name shown to clients (default: the model's)")
    add("--dtype", choices=DTYPES, default="auto", help="arithmetic (default: %(default)s)")
    add(
        "--device",
        default="cpu",
        metavar="DEVICE",
        help="where to compute: cpu, cuda or cuda:N (default: %(default)s)",
    )
    add(
        "--kernels",
        choices=KERNELS,
        default="auto",
        help="the fastest there, torch calls only, a GPU's own or an error, or the plain reference "
        "(default: %(default)s)",
    )
    add(
        "--load-format",
        choices=LOAD_FORMATS,
        default="auto",
        help="dummy: random weights of the model's shapes, for benchmarks (default: %(default)s)",
    )
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="KV as the arithmetic is, or in 8 bits, which takes half of the memory "
        "(default: %(default)s)",
    )
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        default="none",
        help="round weights while they are loaded: to 8 bits, to 8 bits with inputs rounded too, "
        "or to 4 (default: %(default)s; a quantized checkpoint says it itself)",
    )
    add(
        "--cuda-graph-max-tokens",
        type=int,
        default=DEFAULT_GRAPH_MAX_TOKENS,
        metavar="N",
        help="capture steps of up to N tokens on a GPU; 0: none (default: %(default)s)",
    )
    add("--max-model-len", type=int, metavar="N", help="context length (default: the model's)")
    add(
        "--page-size",
        type=int,
        default=1,
        metavar="N",
        help="tokens a KV page (default: %(default)s)",
    )
    add(
        "--mem-fraction",
        type=float,
        metavar="F",
        help="share of the available memory for KV (default: the device's)",
    )
    add("--max-total-tokens", type=int, metavar="N", help="KV pool size in tokens instead")
    add(
        "--chunked-prefill-size",
        type=int,
        default=2048,
        metavar="N",
        help="token budget of a step (default: %(default)s)",
    )
    add(
        "--max-running-requests",
        type=int,
        default=128,
        metavar="N",
        help="requests in a batch (default: %(default)s)",
    )
    add(
        "--decode-slowdown",
        type=float,
        default=DEFAULT_SLOWDOWN,
        metavar="F",
        help="while a long prompt is computed, steps of requests that decode may take F times as "
        "long; 0: no limit (default: %(default)s)",
    )
    add(
        "--schedule-policy",
        choices=POLICY_NAMES,
        default=DEFAULT_POLICY,
        help="which waiting request is admitted next (default: %(default)s)",
    )
    add(
        "--tenant-weights",
        default="",
        metavar="NAME=W,...",
        help="shares of the engine between tenants that have work (default: 1 each)",
    )
    add(
        "--disable-leases",
        action="store_true",
        help="keep cached KV by last use only, whatever programs know or say",
    )
    add(
        "--pin-share",
        type=float,
        default=DEFAULT_PIN_SHARE,
        metavar="F",
        help="share of the KV pool that pins may take (default: %(default)s)",
    )
    add(
        "--host-kv-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens of KV to keep in host memory when the pool is full (default: none)",
    )
    add(
        "--kv-store",
        type=Path,
        metavar="DIR",
        help="folder that keeps the KV of prefixes, also over a restart",
    )
    add(
        "--kv-store-gb",
        type=float,
        default=4.0,
        metavar="GB",
        help="largest size of that folder (default: %(default)s)",
    )
    add(
        "--disable-overlap",
        action="store_true",
        help="plan no step while a device computes the one before (the output is the same)",
    )
    add(
        "--disable-jump-forward",
        action="store_true",
        help="compute tokens that a grammar forces one by one (the output is the same)",
    )
    add(
        "--grammar-timeout",
        type=float,
        default=DEFAULT_GRAMMAR_TIMEOUT_S,
        metavar="S",
        help="seconds that compiling a grammar may take (default: %(default)s)",
    )
    add(
        "--enable-lora",
        action="store_true",
        help="serve LoRA adapters, also those that are loaded while it runs",
    )
    add(
        "--lora-paths",
        type=_named_path,
        nargs="+",
        default=(),
        metavar="NAME=FOLDER",
        help="LoRA adapters (Hugging Face PEFT) that are there from the start; "
        "FOLDER alone has its path for a name",
    )
    add(
        "--lora-root",
        type=Path,
        metavar="FOLDER",
        help="load adapters while it runs from within this folder only (default: from anywhere)",
    )
    add(
        "--max-loras-per-batch",
        type=int,
        default=8,
        metavar="N",
        help="adapters on the device, and so in one step (default: %(default)s)",
    )
    add(
        "--max-loaded-loras",
        type=int,
        metavar="N",
        help="adapters known by name at a time (default: any number)",
    )
    add(
        "--max-lora-rank",
        type=int,
        metavar="R",
        help="largest rank of an adapter (default: that of --lora-paths, or "
        f"{DEFAULT_MAX_LORA_RANK} without any)",
    )
    add(
        "--num-threads",
        type=int,
        metavar="N",
        help="compute threads (default: all cores; one for a small model)",
    )
    add(
        "--spin-us",
        type=int,
        metavar="US",
        help="microseconds that an idle compute thread spins before it sleeps",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The record from parsed flags."""
    names = EngineConfig.__dataclass_fields__
    return EngineConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})


def _named_path(text: str) -> tuple[str, Path]:
    """ "name=folder"; a folder alone is its own name, as for SGLang."""
    name, separator, folder = text.partition("=")
    return (name, Path(folder)) if separator else (text, Path(text))


def _require(field: str, value: object, is_fine: bool, allowed: str) -> None:
    if not is_fine:
        raise InvalidRequest.of(field, value, allowed)


def _require_range(field: str, value: int | None, low: int, high: int) -> None:
    fits = value is None or (isinstance(value, int) and low <= value <= high)
    _require(field, value, fits, f"an integer in [{low}, {high}]")


def located(config: EngineConfig, on_progress: ByteProgress | None = None) -> EngineConfig:
    """The configuration with the model's folder in place of what was typed; the name under which
    it is served stays. Raises as `locate_model` does."""
    folder = locate_model(config.model, revision=config.revision, on_progress=on_progress)
    if folder == config.model:
        return config
    return replace(config, model=folder, revision=None, served_model_name=config.model_name)
