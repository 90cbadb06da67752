"""Gemma 1 to 3: an embedding scaled by sqrt(hidden_size), norms by 1 + weight, GeGLU.

Gemma 2: norms before and after each block, soft caps, a window in every second layer (Riviere et
al. 2024, section 2). Gemma 3: norms of queries and keys, a window in five of six layers, and a
separate rotary base for these layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ....kernels.model_options import AttentionOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, LayerNames
from .decoder import (
    read_activation,
    read_decoder,
    read_text_half,
    with_window_rope,
    with_windows,
)

_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
}
_DEFAULTS_2 = {
    **_DEFAULTS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_DEFAULTS_3 = {
    **_DEFAULTS_2,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window_pattern": 6,
}


def read_gemma(config: Fields, architecture: str) -> DecoderConfig:
    """Old configs say "gelu" and mean its tanh approximation, as Hugging Face treats it."""
    config = config.with_defaults({**_DEFAULTS, "hidden_act": "gelu_pytorch_tanh"})
    decoder = _gemma(config, architecture)
    activation = read_activation(config)
    return replace(decoder, activation="gelu_tanh" if activation == "gelu" else activation)


def read_gemma2(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_2)
    decoder = _gemma(config, architecture)
    return _with_options(
        decoder,
        config,
        default=[index % 2 == 0 for index in range(decoder.num_layers)],
        soft_cap=config.optional_number("attn_logit_softcapping"),
    )


def read_gemma3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_3)
    config.restrict("attn_logit_softcapping")
    decoder = with_window_rope(
        config, lambda fields: _gemma(fields, architecture), window_theta="rope_local_base_freq"
    )
    period = config.integer("sliding_window_pattern")
    default = [(index + 1) % period != 0 for index in range(decoder.num_layers)]
    decoder = replace(decoder, query_key_norm="head")
    return _with_options(decoder, config, default=default, soft_cap=None)


def read_gemma3_with_images(config: Fields, architecture: str) -> DecoderConfig:
    return read_text_half(config, lambda text: read_gemma3(text, architecture), is_tied=True)


def _gemma(config: Fields, architecture: str) -> DecoderConfig:
    config.restrict("use_bidirectional_attention", False)
    config.restrict("mlp_bias", False)
    decoder = read_decoder(config, architecture)
    attention_bias = config.flag("attention_bias", False)
    return replace(
        decoder,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        has_unit_offset_norms=True,
        embedding_multiplier=math.sqrt(decoder.hidden_size),
    )


def read_gemma_layers(config: Fields, architecture: str) -> DecoderConfig:
    """What Gemma 3n and 4 have of Gemma; their norms multiply by the weight alone."""
    config.restrict("hidden_activation", "gelu_pytorch_tanh")
    decoder = _gemma(config, architecture)
    return replace(
        decoder,
        has_unit_offset_norms=False,
        activation="gelu_tanh",
        logits_soft_cap=config.optional_number("final_logit_softcapping"),
    )


def _with_options(
    decoder: DecoderConfig, config: Fields, *, default: list[bool], soft_cap: float | None
) -> DecoderConfig:
    """The options that Gemma 2 and 3 share."""
    scalar = config.number("query_pre_attn_scalar", 256.0)
    scale = None if scalar == decoder.head_dim else scalar**-0.5
    decoder = replace(
        decoder,
        activation=read_activation(config, "hidden_activation"),
        logits_soft_cap=config.optional_number("final_logit_softcapping"),
        norm_placement="around",
        names=LayerNames(middle_norm="pre_feedforward_layernorm"),
    )
    return with_windows(
        decoder,
        config,
        default=default,
        window=config.optional_integer("sliding_window"),
        options=AttentionOptions(scale=scale, soft_cap=soft_cap),
    )
