"""Llama 2 to 3.2, and all models published under its architecture (SmolLM, TinyLlama, Yi, ...)."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder


def read_llama(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"eos_token_id": 2})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, architecture),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )
