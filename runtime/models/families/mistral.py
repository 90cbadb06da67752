"""Mistral: Llama with a window in all layers. Ministral, under either of its names: a window in the
layers that `layer_types` lists."""

from __future__ import annotations

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder, with_windows

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}


def read_mistral(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    decoder = read_decoder(config, architecture)
    window = config.optional_integer("sliding_window")
    default = [window is not None] * decoder.num_layers
    return with_windows(decoder, config, default=default, window=window)
