"""Llama 2 to 3.2, and all models published under its architecture (SmolLM, TinyLlama, Yi, ...).

IQuest-Coder is Llama by another name. CWM is Llama with a window in three of four layers. Arcee's
AFM has squared ReLUs without gates, Helium its rotated pairs side by side.
"""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig
from .decoder import read_decoder, with_windows

_DEFAULTS_IQUEST = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_DEFAULTS_CWM = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "sliding_window": 8192,
}
_DEFAULTS_ARCEE = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "relu2",
    "eos_token_id": 128001,
}
_DEFAULTS_HELIUM = {
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 1e5,
}
_EOS_CWM = (128001, 128008, 128009)


def read_llama(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"eos_token_id": 2})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, architecture),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


def read_iquest_coder(config: Fields, architecture: str) -> DecoderConfig:
    config.restrict("clip_qkv")
    config.restrict("use_sliding_window", False)
    return read_llama(config.with_defaults(_DEFAULTS_IQUEST), architecture)


def read_cwm(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"eos_token_id": None, **_DEFAULTS_CWM})
    config.restrict("attention_bias", False)
    decoder = read_llama(config, architecture)
    decoder = replace(decoder, eos_token_ids=decoder.eos_token_ids or _EOS_CWM)
    default = [index % 4 != 0 for index in range(decoder.num_layers)]
    window = config.optional_integer("sliding_window")
    return with_windows(decoder, config, default=default, window=window)


def read_arcee(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_ARCEE)
    config.restrict("hidden_act", "relu2")
    gated = Fields(config.file, {**config.values, "hidden_act": None})
    decoder = read_llama(gated, architecture)
    return replace(decoder, has_gates=False, plain_activation="relu_squared")


def read_helium(config: Fields, architecture: str) -> DecoderConfig:
    decoder = read_llama(config.with_defaults(_DEFAULTS_HELIUM), architecture)
    return replace(decoder, output_bias=False, has_interleaved_rope=True)
