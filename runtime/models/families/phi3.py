"""Phi-3, Phi-4 and Phi-4-mini: LongRoPE, partly rotated heads, a window, and fused projections in
the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder, with_windows

_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000}


def read_phi3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    for field in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.restrict(field, False)
    for field in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini's config turns these off
        config.restrict(field, 1)
    decoder = read_decoder(_with_longrope(config), architecture, can_rotate_in_part=True)
    window = config.optional_integer("sliding_window")
    default = [window is not None] * decoder.num_layers
    decoder = with_windows(decoder, config, default=default, window=window)
    return replace(decoder, has_fused_projections=True)


def _with_longrope(config: Fields) -> Fields:
    """Early checkpoints name LongRoPE "su" or "yarn"."""
    values: dict[str, Any] = {"original_max_position_embeddings": 4096, **config.values}
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.nested(name)
        if rope is not None and (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
            values[name] = {**rope.values, "rope_type": "longrope"}
    return Fields(config.file, values)
