"""A checkpoint that is ready to serve, as the configuration says: its engine, tokenizer, chat
template and defaults."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..constrained.serving.compiler_service import GrammarCompiler
from ..constrained.serving.grammar_files import GrammarFiles
from ..constrained.vocabulary import Vocabulary
from ..errors import InvalidRequest, ModelLoadError
from ..frontend.client.progress import byte_progress, graph_progress
from ..frontend.protocol.ir import Sampling
from ..frontend.protocol.kv_policy import ALL_KV, KVPolicy
from ..kernels.model_options import AttentionOptions, LatentOptions
from ..native_library import BuildError
from .checkpoint.config.embedding_config import EmbeddingConfig
from .checkpoint.config.model_config import ModelConfig
from .checkpoint.draft_checkpoint import DraftCheckpoint, OwnPredictor
from .checkpoint.location import MTP
from .checkpoint.lora.adapter_config import AdapterConfig
from .checkpoint.lora.registry import AdapterRegistry
from .checkpoint.safetensors.revision import model_revision, text_revision
from .config import (
    DEFAULT_MAX_LORA_RANK,
    MAX_LORA_RANK,
    MOONCAKE_SCHEME,
    REDIS_SCHEMES,
    REMOTE_SCHEMES,
    EngineConfig,
    Role,
    located,
)
from .engine import Engine
from .execute.dtype_name import dtype_name
from .images.registry import ImageLimits, ImageRegistry
from .memory.disk.block_key import (
    BLOCK_TOKENS,
    BlockLayout,
    StateBlockLayout,
    StoredLayout,
    states_share,
)
from .memory.disk.block_store import BlockStore
from .memory.disk.store import DiskStore
from .memory.remote.remote_store import RemoteStore
from .memory.state_layout import checkpoint_interval
from .models.drafts import config_of, read_draft, require_same_tokens
from .models.model_config import read_model_config
from .programs.context import AssistantTurnCache, Defaults, ProgramContext
from .programs.embedded_text import Encoder, report_of
from .programs.foretelling import Foreteller
from .schedule.cache.coming_prefixes import ComingPrefixes
from .schedule.cache.kv_cache import KVCacheOptions
from .schedule.cache.state_cache import StateOptions
from .schedule.cache.stored_prefixes import StoredPrefixes
from .schedule.compression import CompressedPrefixes
from .schedule.image_encodings import ImageEncodings
from .schedule.queue.adapter_slots import AdapterSlots
from .schedule.queue.fairness import tenant_weights
from .speculate.drafters import make_drafting
from .speculate.drafting import Drafting
from .tokenizer.chat_template import ChatTemplate
from .tokenizer.token_bytes import token_bytes
from .tokenizer.tokenizer import MAX_TEXT_CHARS, Tokenizer

if TYPE_CHECKING:  # they need ZeroMQ, which benchmarks of a runner do without
    from .memory.peers.kv_sender import KVSender

log = logging.getLogger(__name__)


class LoadedModel:
    """A checkpoint ready to serve: engine, tokenizer, chat template and defaults."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ModelLoadError or InvalidRequest with the cause."""
        # It imports torch: not for the host half.
        from .execute.model_runner import why_slow
        from .parallel.expert_groups import expert_groups_of
        from .parallel.leader import load_model
        from .parallel.places import Division

        config = located(config)
        self.folder = Path(config.model)
        self.model_config = read_model_config(self.folder)
        has_states = self.model_config.recurrent is not None
        self.config = config = config.for_model(has_states=has_states)
        self.tokenizer = Tokenizer(self.folder, self.model_config.vocab_size)
        vision = self.model_config.vision
        self.template = ChatTemplate(
            self.folder,
            self.tokenizer,
            config.chat_template,
            image_token=None
            if vision is None
            else self.tokenizer.token_text(vision.image_token_id),
        )
        self.embedding = EmbeddingConfig.from_folder(self.folder)
        of_draft = (config.draft_model, config.draft_layers, config.draft_quantization)
        self.draft = read_draft(self.model_config, *of_draft)
        require_same_tokens(self.draft, self.tokenizer, config.model_name)
        _require_states_fit(self.config, self.model_config)
        groups = expert_groups_of(config, self.model_config)
        with byte_progress(sys.stderr, f"loading {config.model_name}") as on_progress:
            self.runner, self.ranks = load_model(
                self.folder,
                self.model_config,
                Division(config.tp_size, config.cp_size, groups, config.pp_size),
                dtype=config.dtype,
                device=config.device,
                max_total_tokens=config.max_total_tokens,
                mem_fraction=config.mem_fraction,
                page_size=config.tokens_a_page,
                num_host_pages=config.host_kv_tokens // config.tokens_a_page,
                max_running_requests=config.max_running_requests,
                max_model_len=config.max_model_len,
                max_step_tokens=config.chunked_prefill_size,
                graph_max_tokens=config.cuda_graph_max_tokens,
                kernels="deterministic" if config.deterministic else config.kernels,
                prefill_attention=config.prefill_attention,
                load_format=config.load_format,
                kv_cache_dtype=config.kv_cache_dtype,
                quantization=config.quantization,
                num_adapter_slots=config.max_loras_per_batch if config.has_lora else 0,
                max_adapter_rank=_max_lora_rank(config),
                num_state_checkpoints=config.state_checkpoints,
                draft=self.draft,
                on_progress=on_progress,
            )
        self.executor = self.runner if self.ranks is None else self.ranks
        self.slow_path = why_slow(config.dtype, config.device, config.kernels)
        self.images = self._image_registry()
        weights = model_revision(
            self.folder,
            self.model_config,
            self.runner.max_model_len,
            config.quantization,
            config.load_format,
        )
        self._revisions = [weights, text_revision(self.folder)]  # some ms: not for each client
        self.adapters = self._adapter_registry()
        self.executor.warm_up(graph_progress(sys.stderr))
        if self.runner.expert_loads is not None:
            self.runner.expert_loads.clear()
        self._window = self._window_policy()
        self.engine = Engine(
            self.executor,
            num_pages=self.runner.num_pages,
            page_size=config.tokens_a_page,
            max_model_len=self.runner.max_model_len,
            token_budget=config.chunked_prefill_size,
            max_running_requests=config.max_running_requests,
            schedule_policy=config.schedule_policy,
            decode_slowdown=config.decode_slowdown,
            tenant_weights=tenant_weights(config.tenant_weights),
            vocab_size=self.model_config.vocab_size,
            kv_cache=KVCacheOptions(
                has_leases=not config.disable_leases,
                shares_begun_pages=not config.has_draft_model,
                pin_share=config.pin_share,
                num_host_pages=config.host_kv_tokens // config.tokens_a_page,
                stored=self._stored_prefixes(),
                coming=self._coming_prefixes(),
                states=self._state_options(),
            ),
            has_overlap=not config.disable_overlap,
            num_stages=1 if config.disable_overlap else config.pp_size,
            drafting=self._drafting(),
            adapters=self._adapter_slots(),
            images=self._image_encodings(),
            num_layers=self.model_config.num_layers,
            gives_up_kv=self._window is not None,
            grammars=GrammarCompiler(
                self._vocabulary,
                timeout_s=config.grammar_timeout,
                backend=config.grammar_backend,
                files=self._grammar_files(),
            ),
        )
        self._kv_policy()
        self.foreteller = self._foreteller()
        self.kv_sender = self._kv_sender()
        self.role = config.role
        self.set_role(config.role)

    def set_role(self, role: Role) -> None:
        """From the next prompt on, as far as the configuration says with whom."""
        self.role = role
        coming = self.engine.scheduler.kv_cache.coming
        if coming is not None:
            coming.is_on = role != "prefill"
        if self.kv_sender is not None:
            self.kv_sender.accepts = role != "decode"

    def _coming_prefixes(self) -> ComingPrefixes | None:
        """From the engines that compute prompts for this one."""
        config = self.config
        if not config.prefill_engines or self.runner.states is not None:
            return None
        from .memory.peers.kv_receiver import KVReceiver
        from .memory.peers.transports import offers_by

        offers = offers_by(config.kv_transport)
        receiver = KVReceiver(config.prefill_engines, self._block_layout(), offers=offers)
        return ComingPrefixes(receiver, config.tokens_a_page)

    def _kv_sender(self) -> KVSender | None:
        """To engines that ask this one to compute prompts."""
        if self.config.prefill_endpoint is None:
            return None
        from .memory.peers.kv_sender import KVSender

        nixl = None
        if self.config.kv_transport == "nixl":
            from .memory.peers.nixl_memory import NixlWorker

            nixl = NixlWorker()
        endpoint, vocab_size = self.config.prefill_endpoint, self.model_config.vocab_size
        sender = KVSender(endpoint, self._block_layout(), vocab_size=vocab_size, nixl=nixl)
        self.executor.stream_to(sender)
        return sender

    def _block_layout(self) -> BlockLayout:
        """What makes KV interchangeable between engines."""
        arithmetic = dtype_name(self.runner.dtype)
        if self.config.deterministic:
            ranks = self.config.tp_size  # whose sums are of other terms for another number
            arithmetic += " deterministic" + f" tp {ranks}" * (ranks > 1)
        if (of_draft := self._draft_revision()) is not None:
            arithmetic += f" draft {of_draft}"
        return BlockLayout(self._revisions[0], arithmetic, self.runner.whole_kv_layout)

    def _state_options(self) -> StateOptions | None:
        """Of a model with recurrent layers."""
        runner = self.runner
        if runner.states is None:
            return None
        default = checkpoint_interval(runner.states.layout, runner.kv_layout)
        interval = self.config.state_interval or default
        return StateOptions(
            runner.states.num_slots,
            interval,
            runner.states.num_host_slots,
            BLOCK_TOKENS if self.config.kv_store is not None else 0,
        )

    def _image_registry(self) -> ImageRegistry | None:
        """Where the vision tower is loaded. Raises ModelLoadError."""
        vision, config = self.model_config.vision, self.config
        if vision is None or self.runner.model.vision is None:
            return None
        limits = ImageLimits(config.max_images, config.max_image_pixels)
        return ImageRegistry.of(self.folder, vision, limits)

    def _images_refusal(self) -> str | None:
        """Why it takes no images, if not for its being a model of text."""
        if self.model_config.vision is None or self.images is not None:
            return None
        return "its vision tower is computed on a CPU alone (device=cpu)"

    def _image_encodings(self) -> ImageEncodings | None:
        vision = self.model_config.vision
        if vision is None or self.images is None:
            return None
        size = vision.num_feature_layers * vision.out_size * self.runner.dtype.itemsize
        return ImageEncodings(
            max_bytes=self.config.image_cache_mb << 20,
            num_blocks=vision.num_blocks,
            bytes_per_token=size,
        )

    @property
    def does_nothing_ahead(self) -> bool:
        """Whether no likely text is computed while the device idles: also where nothing keeps it
        from being evicted before its use, or a model's states are cached at few places of a
        text."""
        config = self.config
        return config.disable_ahead or config.disable_leases or self.runner.states is not None

    def _foreteller(self) -> Foreteller | None:
        if self.config.disable_ahead:
            return None
        try:
            scheduler = self.engine.scheduler
            return Foreteller(
                lambda: scheduler.costs.load(time.perf_counter()), lambda: len(scheduler.running)
            )
        except BuildError as error:
            log.warning("no likely outputs are told, so no tool starts early: %s", error)
            return None

    def _drafting(self) -> Drafting | None:
        config = self.config
        return make_drafting(
            config.speculate,
            config.speculative_num_tokens,
            is_cpu=config.device == "cpu",
            has_model=config.has_draft_model,
            max_ahead=None if self.draft is None else self.draft.max_ahead,
            num_candidates=config.draft_candidates,
            has_kv=self.draft is not None and config_of(self.draft, self.model_config) is not None,
        )

    def _draft_revision(self) -> str | None:
        """Of what guesses, where it has KV of its own; what has none leaves blocks as they are."""
        draft, config = self.draft, self.config
        if isinstance(draft, OwnPredictor):
            return MTP
        if not isinstance(draft, DraftCheckpoint) or draft.config is None:
            return None
        length = self.model_config.context_length
        files = (draft.folder, draft.config, length, config.draft_quantization, config.load_format)
        revision = model_revision(*files)
        return revision if draft.head is None else f"{revision} {draft.head}"

    def _adapter_registry(self) -> AdapterRegistry | None:
        """The adapters given at the start. Raises ModelLoadError."""
        config = self.config
        if not config.has_lora:
            return None
        registry = AdapterRegistry(
            config.model_name,
            self.runner.adapter_modules,
            max_rank=_max_lora_rank(config),
            prepare=self.executor.prepare_adapter,
            max_adapters=config.max_loaded_loras,
        )
        for name, folder in config.lora_paths:
            registry.load(name, folder)
        return registry

    def _adapter_slots(self) -> AdapterSlots | None:
        if self.adapters is None:
            return None
        return AdapterSlots(self.config.max_loras_per_batch, self.executor.load_adapter)

    def _stored_prefixes(self) -> StoredPrefixes | None:
        """The store of prefixes, which outlives this process."""
        config = self.config
        if config.kv_store is None:
            return None
        layout = self._block_layout()
        max_bytes = config.kv_store_gb * 1e9
        if self.runner.state_layout is None:
            return StoredPrefixes(self._block_store(layout, max_bytes), config.tokens_a_page)
        of_states = StateBlockLayout(layout, self.runner.state_layout)
        for_states = max_bytes * states_share(of_states)
        return StoredPrefixes(
            self._block_store(layout, max_bytes - for_states),
            config.tokens_a_page,
            states=self._block_store(of_states, for_states),
        )

    def _block_store(self, layout: StoredLayout, max_bytes: float) -> BlockStore:
        where = str(self.config.kv_store)
        if where.startswith(REDIS_SCHEMES):
            from .memory.remote.redis_client import RedisClient

            return RemoteStore(RedisClient(where, layout), layout)
        if where.startswith(MOONCAKE_SCHEME):
            from .memory.remote.mooncake_client import MooncakeClient

            return RemoteStore(MooncakeClient(where, layout), layout)
        return DiskStore(Path(where), layout, max_bytes=int(max_bytes))

    def _grammar_files(self) -> GrammarFiles | None:
        folder = self.config.grammar_cache
        try:
            return None if folder is None else GrammarFiles(folder)
        except OSError as error:
            allowed = f"a folder of the user's own, which can be written ({error})"
            raise InvalidRequest.of("grammar_cache", str(folder), allowed) from error

    def _vocabulary(self) -> Vocabulary:
        written = token_bytes(self.folder, self.tokenizer)
        return Vocabulary(written, self.tokenizer.encode_forced, self.model_config.vocab_size)

    def token_texts(self) -> list[bytes]:
        """What each token id writes, special ones their names, for ids in [0, vocab_size)."""
        size = self.model_config.vocab_size
        written = token_bytes(self.folder, self.tokenizer)[:size]
        texts = [
            self.tokenizer.token_text(token_id).encode() if text is None else text
            for token_id, text in enumerate(written)
        ]
        return texts + [b""] * (size - len(texts))

    def defaults(self) -> Defaults:
        """What a gen leaves open is the model's own choice (generation_config.json)."""
        model = self.model_config
        options = Sampling(
            temperature=model.default_temperature,
            top_p=model.default_top_p,
            top_k=model.default_top_k,
            min_p=model.default_min_p,
            repetition_penalty=model.default_repetition_penalty,
        )
        final = (*model.eos_token_ids, *self.tokenizer.final_ids)
        return Defaults(options, tuple(dict.fromkeys(final)))

    def context(self) -> ProgramContext:
        """The context that all programs on this engine share."""
        most, policy = self.engine.max_model_len, self._kv_policy()
        max_chars = most * self.tokenizer.longest_token_chars
        if policy is not None and policy.is_stream:  # whose text may be longer than the context
            most, max_chars = sys.maxsize, MAX_TEXT_CHARS
        return ProgramContext(
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            template=self.template,
            defaults=self.defaults(),
            queue=self.engine,
            next_request_id=self.engine.next_request_id,
            assistant_turns=AssistantTurnCache(),
            grammars=self.engine.grammars,
            jump_forward=not self.config.disable_jump_forward,
            kv=self.engine.scheduler.kv_cache,
            adapters=self.adapters,
            encoder=self._encoder(),
            images=self.images,
            compressed=self._compressed_prefixes(),
            kv_policy=policy,
            foreteller=self.foreteller,
            max_prompt_tokens=most,
            max_text_chars=max_chars,
        )

    def _kv_policy(self) -> KVPolicy | None:
        """Of calls that name none. Raises InvalidRequest where it cannot be done."""
        if self.config.kv_policy in (None, ALL_KV):
            return self._window
        policy = KVPolicy.from_text(self.config.kv_policy)
        self._compressed_prefixes().require(policy)
        return policy

    def _window_policy(self) -> KVPolicy | None:
        """Of a model whose layers all see a window alone: KV behind it is given up, where it can
        be and no file is to keep it."""
        windows = [_window_of(kind) for kind in self.model_config.attention_kinds]
        config = self.config
        if None in windows or config.kv_policy is not None or config.kv_store is not None:
            return None
        if self._compression_refusal() is not None:
            return None
        policy = KVPolicy("window", max(window for window in windows if window), sinks=0)
        most = self.runner.max_model_len, self.runner.num_pages
        prefixes = CompressedPrefixes(config.tokens_a_page, config.chunked_prefill_size, *most)
        return policy if prefixes.fits(policy) else None

    def _compression_refusal(self) -> str | None:
        """Why pages of this engine cannot be given other tokens' KV; None: they can."""
        config = self.config
        if self.model_config.latent is not None or len(set(self.model_config.kv_shapes)) > 1:
            return "of this model's attention all KV is kept (latents, or layers that differ)"
        if self.model_config.recurrent is not None:
            return "models with recurrent layers keep all KV"
        if self.runner.accelerator is not None:
            return "KV is compressed on CPUs"
        if config.num_processes > 1 or config.role != "both" or config.prefill_engines:
            return "KV is compressed in engines of one process"
        if self.draft is not None:
            return "an engine with a draft model keeps all KV"
        return None

    def _compressed_prefixes(self) -> CompressedPrefixes:
        refusal = self._compression_refusal()
        if any(map(_sees_a_part, self.model_config.attention_kinds)):
            refusal = "this model's layers see windows of the text, and keep all of these"
        elif self.model_config.is_normed_after_rotation:
            refusal = "this model's keys are normed behind their rotation, and keep their place"
        return CompressedPrefixes(
            self.config.tokens_a_page,
            self.config.chunked_prefill_size,
            self.engine.max_model_len,
            self.engine.scheduler.kv_cache.num_pages,
            refusal,
            self._window,
        )

    def _encoder(self) -> Encoder | None:
        """Of a model that generates nothing."""
        model, head = self.model_config, self.runner.score_head
        if not model.is_bare:
            return None
        return Encoder(
            model.architecture,
            has_scores=model.labels is not None,
            is_causal=True,
            score_head=None if head is None else head.numpy(),
        )

    def describe_ranks(self) -> list[dict[str, Any]]:
        """The other processes that hold the model; see `Leader.describe`."""
        return [] if self.ranks is None else self.ranks.describe()

    def describe_experts(self) -> dict[str, Any]:
        """How often tokens chose each expert; {} without experts."""
        return self.runner.describe_experts()

    def describe(self) -> dict[str, Any]:
        """What a client receives when it connects."""
        model = self.model_config
        return {
            "model": self.config.model_name,
            "model_path": str(self.folder.resolve()),
            "chat_template": self.config.chat_template,
            "revisions": self._revisions,
            "architecture": model.architecture,
            "dtype": dtype_name(self.runner.dtype),
            "deterministic": self.config.deterministic,
            "quantization": self.config.quantization,
            "device": self.config.device,
            "tp_size": self.config.tp_size,
            "ep_size": self.config.ep_size,
            "pp_size": self.config.pp_size,
            "cp_size": self.config.cp_size,
            "kv_cache_dtype": self.config.kv_cache_dtype,
            "shares_kv": str(self.config.kv_store).startswith(REMOTE_SCHEMES),
            "kv_bytes_per_token": self.runner.whole_kv_layout.bytes_per_token,
            "vocab_size": model.vocab_size,
            "max_model_len": self.engine.max_model_len,
            "max_running_requests": self.config.max_running_requests,
            "has_lora": self.config.has_lora,
            "reads_images": self.images is not None,
            "images_refusal": self._images_refusal(),
            "template_knows_tools": self.template.knows_tools,
            "foretells": self.foreteller is not None,
            **report_of(
                model.architecture,
                self.embedding,
                model.hidden_size,
                model.labels,
                generates=not model.is_bare,
            ),
            "chat_format": self.template.describe(),
            "kernels": [
                {"op": c.op, "implementation": c.implementation, "reason": c.reason}
                for c in self.runner.kernels.describe()
            ],
            "slow_path": self.slow_path,
        }


def _window_of(kind: AttentionOptions | LatentOptions) -> int | None:
    """Of the tokens that queries of such layers see; None: more than a window."""
    if not isinstance(kind, AttentionOptions) or kind.num_sink_tokens:
        return None
    return kind.window


def _sees_a_part(kind: AttentionOptions | LatentOptions) -> bool:
    """Whether queries of such layers see less than all that is before."""
    return isinstance(kind, AttentionOptions) and not (kind.window is None and kind.chunk is None)


def _require_states_fit(config: EngineConfig, model: ModelConfig) -> None:
    """Raises InvalidRequest for tiers that cannot keep a model's recurrent states."""
    if model.recurrent is None:
        return
    why, store = f"{model.architecture} has recurrent layers", config.kv_store
    if config.device != "cpu":
        why += ", whose states are copied to other tiers on a CPU alone"
        if config.host_kv_tokens:
            raise InvalidRequest.of("host_kv_tokens", config.host_kv_tokens, f"0: {why}")
        if store is not None:
            raise InvalidRequest.of("kv_store", str(store), f"none: {why}")
    for field in ("prefill_endpoint", "prefill_engines"):
        if value := getattr(config, field):
            raise InvalidRequest.of(field, value, f"none: {why}, whose states are not sent")
    if str(store).startswith(MOONCAKE_SCHEME):
        why += ", and Mooncake has no list of the states that it keeps"
        raise InvalidRequest.of("kv_store", str(store), f"a folder or redis://HOST:PORT/DB: {why}")


def _max_lora_rank(config: EngineConfig) -> int:
    """Raises ModelLoadError for an adapter whose config cannot be read."""
    if config.max_lora_rank is not None:
        return config.max_lora_rank
    ranks = [AdapterConfig.from_folder(folder).max_rank for _, folder in config.lora_paths]
    rank = max(ranks, default=DEFAULT_MAX_LORA_RANK)
    if rank > MAX_LORA_RANK:
        raise ModelLoadError(f"an adapter of lora_paths has rank {rank}; at most {MAX_LORA_RANK}")
    return rank
