"""Command R and Aya (Cohere), Command R7B and A (Cohere2): LayerNorm without biases, both blocks
beside each other, rotated pairs side by side, and scaled logits. Cohere2 has a window in three of
four layers, and no rotary embedding in the others."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import with_windows
from .llama import read_llama

_DEFAULTS = {
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 255001,
}
_DEFAULTS_1 = {**_DEFAULTS, "rope_theta": 5e5}
_DEFAULTS_2 = {**_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4}


def read_cohere(config: Fields, architecture: str) -> DecoderConfig:
    decoder = _cohere(config.with_defaults(_DEFAULTS_1), architecture)
    has_norms = config.flag("use_qk_norm", False)
    return replace(decoder, query_key_norm="layer" if has_norms else None)


def read_cohere2(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_2)
    config.restrict("use_qk_norm", False)
    decoder = _cohere(config, architecture)
    period = config.integer("sliding_window_pattern")
    decoder = with_windows(
        decoder,
        config,
        default=[(index + 1) % period != 0 for index in range(decoder.num_layers)],
        window=config.optional_integer("sliding_window"),
    )
    full = (index for index in range(decoder.num_layers) if not decoder.has_window(index))
    return replace(decoder, layers_without_rope=tuple(full))


def _cohere(config: Fields, architecture: str) -> DecoderConfig:
    for field in ("use_parallel_block", "use_gated_activation"):
        config.restrict(field, True)
    config.restrict("rotary_pct", 1)
    config.restrict("mlp_bias", False)
    own = {"rms_norm_eps": config.number("layer_norm_eps", 1e-5)}
    decoder = read_llama(Fields(config.file, {**config.values, **own}), architecture)
    return replace(
        decoder,
        norm="layer",
        norm_placement="parallel",
        has_interleaved_rope=True,
        logits_divisor=1 / config.number("logit_scale", 0.0625),
    )
