"""Seed-OSS: Llama with wide heads, and biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "eos_token_id": 2,
}


def read_seed_oss(config: Fields, architecture: str) -> DecoderConfig:
    return replace(
        read_decoder(config.with_defaults(_DEFAULTS), architecture),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
