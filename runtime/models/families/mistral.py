"""Mistral: Llama with a window in all layers. Ministral, under either of its names: a window in the
layers that `layer_types` lists. Ministral 3: queries scaled by their position. Mistral Small from
3.1 on and Ministral 3 are published with a vision tower, which is not read."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, QueryScaling
from .decoder import read_decoder, read_text_half, with_windows

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "eos_token_id": 2,
}

_DEFAULTS_MINISTRAL_3 = {
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
# Of the rotary embedding, beside the fields that all families have.
_OWN = ("llama_4_scaling_beta", "max_position_embeddings")


def read_mistral(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    decoder = read_decoder(config, architecture)
    window = config.optional_integer("sliding_window")
    default = [window is not None] * decoder.num_layers
    return with_windows(decoder, config, default=default, window=window)


def read_ministral3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_MINISTRAL_3)
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.nested(name) or Fields(config.file, {})
    rest = {key: value for key, value in rope.values.items() if key not in _OWN}
    decoder = read_mistral(Fields(config.file, {**config.values, name: rest}), architecture)
    if not rope.get("llama_4_scaling_beta"):
        return decoder
    length = rope.integer("original_max_position_embeddings")
    scaling = QueryScaling(rope.number("llama_4_scaling_beta", 1.0), length)
    return replace(decoder, query_scaling=scaling)


_TEXT_HALVES = {"mistral": read_mistral, "ministral3": read_ministral3}


def read_mistral_with_images(config: Fields, architecture: str) -> DecoderConfig:
    """Mistral Small's config names no tie, and its file has both matrices."""

    def read(text: Fields) -> DecoderConfig:
        text.restrict("model_type", *_TEXT_HALVES)
        return _TEXT_HALVES[text.get("model_type") or "mistral"](text, architecture)

    return read_text_half(config, read, is_tied=False)
