"""SmolLM3: Llama without rotary embedding in every fourth layer (Yang et al., "RNoPE", 2025)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import with_windows
from .llama import read_llama

_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}


def read_smollm3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    decoder = read_llama(config, architecture)
    without_rope = layers_without_rope(config, decoder.num_layers)
    has_window = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window") if has_window else None
    default = [window is not None and i in without_rope for i in range(decoder.num_layers)]
    return with_windows(
        replace(decoder, layers_without_rope=without_rope), config, default=default, window=window
    )


def layers_without_rope(config: Fields, num_layers: int) -> tuple[int, ...]:
    """`no_rope_layers` has a 1 for each layer with rotary embedding."""
    rotates = config.get("no_rope_layers")
    if rotates is None:
        period = config.integer("no_rope_layer_interval", 4)
        return tuple(range(period - 1, num_layers, period))
    is_list = isinstance(rotates, list) and len(rotates) >= num_layers
    if not is_list or any(each not in (0, 1) for each in rotates):
        raise config.fail("no_rope_layers", f"a list of {num_layers} zeros and ones")
    return tuple(index for index in range(num_layers) if not rotates[index])
