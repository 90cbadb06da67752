"""InternLM3: Llama whose config names its biases by two other fields."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def read_internlm3(config: Fields, architecture: str) -> DecoderConfig:
    """`bias` is of all matrices but those of queries, keys and values, which `qkv_bias` is of.
    transformers writes them by Llama's names."""
    bias = config.flag("bias", config.flag("mlp_bias", False))
    return replace(
        read_decoder(config.with_defaults(_DEFAULTS), architecture),
        qkv_bias=config.flag("qkv_bias", config.flag("attention_bias", False)),
        output_bias=bias,
        mlp_bias=bias,
    )
