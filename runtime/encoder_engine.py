"""An encoder ready to serve: the same engine, over a runner that computes whole texts.

A text's tokens all run in one step: the token budget is at least the longest text. What the
scheduler hands out as pages are the places of a step's tokens; nothing stays in them.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from ..frontend.client.progress import byte_progress
from .checkpoint.config.embedding_config import EmbeddingConfig
from .checkpoint.config.encoder_config import EncoderConfig
from .checkpoint.safetensors.revision import model_revision, text_revision
from .config import EngineConfig, Role, located
from .engine import Engine
from .execute.dtype_name import dtype_name
from .loaded_model import LoadedModel
from .models.encoders.registry import read_encoder
from .programs.context import AssistantTurnCache, Defaults, ProgramContext
from .programs.embedded_text import Encoder, report_of
from .schedule.cache.kv_cache import KVCacheOptions
from .schedule.plan import Encoding, Row, StepPlan
from .schedule.queue.fairness import tenant_weights
from .tokenizer.chat_template import ChatTemplate
from .tokenizer.token_bytes import token_bytes
from .tokenizer.tokenizer import MAX_TEXT_CHARS, Tokenizer

log = logging.getLogger(__name__)


class LoadedEncoder:
    """A checkpoint of an encoder: engine, tokenizer, and what its files say of texts."""

    adapters = None  # none are served
    ranks = None  # it is computed by one process
    role: Role = "both"
    kv_sender = None  # nor is KV sent: nothing of a text is kept
    does_nothing_ahead = True

    def __init__(self, config: EngineConfig, encoder: EncoderConfig) -> None:
        """`config`: located. Raises ModelLoadError or InvalidRequest with the cause."""
        # They import torch: not for the host half.
        from .execute.encoder_runner import EncoderRunner
        from .execute.model_runner import why_slow

        _require_plain(config, encoder)
        self.config, self.encoder = config, encoder
        self.folder = Path(config.model)
        self.tokenizer = Tokenizer(self.folder, encoder.vocab_size)
        self.template = ChatTemplate(self.folder, self.tokenizer, config.chat_template)
        self.embedding = EmbeddingConfig.from_folder(self.folder, is_encoder=True)
        max_model_len = encoder_length(config.max_model_len, encoder, self.embedding)
        with byte_progress(sys.stderr, f"loading {config.model_name}") as on_progress:
            self.runner = EncoderRunner(
                self.folder,
                encoder,
                dtype=config.dtype,
                device=config.device,
                kernels="deterministic" if config.deterministic else config.kernels,
                load_format=config.load_format,
                quantization=config.quantization,
                embedding=self.embedding,
                on_progress=on_progress,
            )
        self.slow_path = why_slow(config.dtype, config.device, config.kernels)
        self._revisions = [
            model_revision(
                self.folder, encoder, max_model_len, config.quantization, config.load_format
            ),
            text_revision(self.folder),
        ]
        self._warm_up(min(16, max_model_len))
        token_budget = max(config.chunked_prefill_size, max_model_len)
        self.engine = Engine(
            self.runner,
            num_pages=token_budget,
            page_size=1,
            max_model_len=max_model_len,
            token_budget=token_budget,
            max_running_requests=config.max_running_requests,
            schedule_policy=config.schedule_policy,
            decode_slowdown=config.decode_slowdown,
            tenant_weights=tenant_weights(config.tenant_weights),
            vocab_size=encoder.vocab_size,
            kv_cache=KVCacheOptions(has_leases=False),
            has_overlap=False,
        )

    def _warm_up(self, length: int) -> None:
        """So that the first request pays no set-up."""
        row = Row(0, 0, 0, (0,) * length, encoding=Encoding())
        self.runner.submit(StepPlan(0, (row,)))

    def context(self) -> ProgramContext:
        """The context that all programs on this engine share."""
        most = self.engine.max_model_len
        return ProgramContext(
            tokenizer=self.tokenizer,
            vocab_size=self.encoder.vocab_size,
            template=self.template,
            defaults=Defaults(),
            queue=self.engine,
            next_request_id=self.engine.next_request_id,
            assistant_turns=AssistantTurnCache(),
            encoder=Encoder(
                self.encoder.architecture,
                has_scores=self.encoder.head is not None,
                is_lowered=self.embedding.is_lowered,
            ),
            max_prompt_tokens=most,
            # One word of any length may be a single, unknown token.
            max_text_chars=MAX_TEXT_CHARS,
        )

    def token_texts(self) -> list[bytes]:
        """What each token id writes, for ids in [0, vocab_size)."""
        size = self.encoder.vocab_size
        written = token_bytes(self.folder, self.tokenizer)[:size]
        texts = [
            self.tokenizer.token_text(token_id).encode() if text is None else text
            for token_id, text in enumerate(written)
        ]
        return texts + [b""] * (size - len(texts))

    def describe_ranks(self) -> list[dict[str, Any]]:
        """None: an encoder is in one process."""
        return []

    def describe_experts(self) -> dict[str, Any]:
        """See `LoadedModel`: no encoder has experts."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What a client receives when it connects."""
        encoder, head = self.encoder, self.encoder.head
        return {
            "model": self.config.model_name,
            "model_path": str(self.folder.resolve()),
            "chat_template": self.config.chat_template,
            "revisions": self._revisions,
            "architecture": encoder.architecture,
            "dtype": dtype_name(self.runner.dtype),
            "deterministic": self.config.deterministic,
            "quantization": self.config.quantization,
            "device": self.config.device,
            "kv_cache_dtype": self.config.kv_cache_dtype,
            "shares_kv": False,
            "kv_bytes_per_token": 0,
            "vocab_size": encoder.vocab_size,
            "max_model_len": self.engine.max_model_len,
            "max_running_requests": self.config.max_running_requests,
            "has_lora": False,
            "template_knows_tools": False,
            **report_of(
                encoder.architecture,
                self.embedding,
                encoder.hidden_size,
                None if head is None else head.labels,
                generates=False,
                sees_pairs=bool(self.tokenizer.pair_marks[0]),
            ),
            "chat_format": self.template.describe(),
            "kernels": [
                {"op": c.op, "implementation": c.implementation, "reason": c.reason}
                for c in self.runner.kernels.describe()
            ],
            "slow_path": self.slow_path,
        }


Loaded = LoadedModel | LoadedEncoder


def load(config: EngineConfig) -> Loaded:
    """The model that the configuration names, whatever its kind. Raises ModelLoadError or
    InvalidRequest with the cause."""
    config = located(config)
    encoder = read_encoder(Path(config.model))
    loaded = LoadedModel(config) if encoder is None else LoadedEncoder(config, encoder)
    if loaded.slow_path is not None:
        log.warning("%s", loaded.slow_path)
    return loaded


def encoder_length(asked: int | None, encoder: EncoderConfig, embedding: EmbeddingConfig) -> int:
    """The longest text, in tokens: as in training, unless more is asked for. Raises
    InvalidRequest."""
    most = encoder.context_length
    if asked is None:
        return min(most, embedding.max_tokens or most)
    if not 1 <= asked <= most:
        allowed = f"an integer in [1, {most}], the model's positions"
        raise InvalidRequest.of("max_model_len", asked, allowed)
    return asked


def _require_plain(config: EngineConfig, encoder: EncoderConfig) -> None:
    """Raises InvalidRequest for options that an encoder has no use for."""
    why = f"{encoder.architecture} encodes whole texts"
    if config.has_lora:
        raise InvalidRequest.of("enable_lora", True, f"false: {why}, without adapters")
    if config.host_kv_tokens:
        raise InvalidRequest.of("host_kv_tokens", config.host_kv_tokens, f"0: {why}, without KV")
    for field in ("kv_store", "prefill_endpoint", "prefill_engines"):
        if value := getattr(config, field):
            raise InvalidRequest.of(field, value, f"none: {why}, without KV")
    for field, none in (("draft_model", "none"), ("draft_layers", 0)):
        if value := getattr(config, field):
            raise InvalidRequest.of(field, value, f"{none}: {why}, and generates nothing")
    for field in ("tp_size", "pp_size", "cp_size"):
        if (size := getattr(config, field)) > 1:
            raise InvalidRequest.of(field, size, f"1: {why}, in one process")
