"""Mistral: a Llama whose layers all see a window; Ministral: some of its layers do."""

from __future__ import annotations

from ..config_fields import Fields
from ..decoder_config import DecoderConfig
from .decoder import read_decoder
from .windows import with_windows

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def read_mistral(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    decoder = read_decoder(config, architecture)
    window = config.optional_integer("sliding_window")
    default = [window is not None] * decoder.num_layers
    decoder = with_windows(decoder, config, default=default, window=window)
    is_uniform = decoder.kind_of_layer is None and decoder.has_window(0) == default[0]
    if architecture == "MistralForCausalLM" and not is_uniform:
        raise config.fail("layer_types", "none: layers differ in a MinistralForCausalLM only")
    return decoder
