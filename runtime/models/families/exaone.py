"""EXAONE 4: norms after the blocks instead of before, normed heads; of the larger one a window in
three of four layers, and no rotary embedding in the others."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder, with_windows

_DEFAULTS = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "eos_token_id": 2,
}


def read_exaone4(config: Fields, architecture: str) -> DecoderConfig:
    """A `sliding_window_pattern` of letters counts nothing beside the `layer_types` that come with
    it."""
    config = config.with_defaults(_DEFAULTS)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    decoder = read_decoder(config, architecture)
    decoder = replace(decoder, norm_placement="after", query_key_norm="head")
    window, layers = config.optional_integer("sliding_window"), range(decoder.num_layers)
    if window is None:
        config.restrict("layer_types", ["full_attention"] * decoder.num_layers)
        return decoder
    period = 1
    if config.get("layer_types") is None:
        period = config.integer("sliding_window_pattern", 4)
    default = [(index + 1) % period != 0 for index in layers]
    decoder = with_windows(decoder, config, default=default, window=window)
    full = tuple(index for index in layers if not decoder.has_window(index))
    return replace(decoder, layers_without_rope=full)
