"""Qwen2 and 2.5: biases of queries, keys and values. Qwen3: norms of queries and keys instead. MiMo
7B: a Qwen2 with a layer for multi-token prediction."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, PredictorConfig
from .decoder import read_decoder, with_windows

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MIMO_LAYER = "model.mtp_layers.0"
_MIMO_PREDICTOR = PredictorConfig(
    layer=_MIMO_LAYER,
    token_norm=f"{_MIMO_LAYER}.token_layernorm",
    hidden_norm=f"{_MIMO_LAYER}.hidden_layernorm",
    merge=f"{_MIMO_LAYER}.input_proj",
    norm=f"{_MIMO_LAYER}.final_layernorm",
    weights=("model.mtp_layers.",),
    hands_on_normed=True,
    is_hidden_first=True,
)


def read_qwen2(config: Fields, architecture: str) -> DecoderConfig:
    return replace(_with_upper_windows(config, architecture), qkv_bias=True)


def read_mimo(config: Fields, architecture: str) -> DecoderConfig:
    config.restrict("attention_bias", True)
    has_predictor = config.get("num_nextn_predict_layers") not in (None, 0)
    return replace(
        read_qwen2(config, architecture),
        unread_weights=("model.mtp_layers.",),
        predictor=_MIMO_PREDICTOR if has_predictor else None,
    )


def read_qwen3(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"head_dim": 128})
    attention_bias = config.flag("attention_bias", False)
    return replace(
        _with_upper_windows(config, architecture),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        query_key_norm="head",
    )


def _with_upper_windows(config: Fields, architecture: str) -> DecoderConfig:
    """Layers from `max_window_layers` on have the window; the checkpoint's window applies only with
    `use_sliding_window`."""
    config = config.with_defaults(_DEFAULTS)
    config.restrict("mlp_bias", False)
    config.restrict("use_mrope", False)
    decoder = read_decoder(config, architecture)
    has_window = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window") if has_window else None
    first = config.count("max_window_layers")
    default = [window is not None and index >= first for index in range(decoder.num_layers)]
    return with_windows(decoder, config, default=default, window=window)
