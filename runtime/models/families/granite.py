"""Granite: Llama with multipliers of the embedding, the scores, the residuals and the logits."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import AttentionOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .llama import read_llama


def read_granite(config: Fields, architecture: str) -> DecoderConfig:
    return replace(
        read_llama(config, architecture),
        attention_kinds=(AttentionOptions(scale=config.number("attention_multiplier", 1.0)),),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )
