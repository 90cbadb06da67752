"""StarCoder2: LayerNorm, a feed-forward block without gates, biases everywhere, and a window in all
layers where the config says so."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, LayerNames
from .decoder import read_decoder, with_windows

_DEFAULTS = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}
_NAMES = LayerNames(up="c_fc", down="c_proj")


def read_starcoder2(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    config.restrict("hidden_act", "gelu_pytorch_tanh")
    for field in ("attention_bias", "mlp_bias"):
        config.restrict(field, False)
    bias = config.flag("use_bias", True)
    own = {"rms_norm_eps": config.number("norm_epsilon", 1e-5)}
    decoder = read_decoder(Fields(config.file, {**config.values, **own}), architecture)
    window = config.optional_integer("sliding_window")
    decoder = with_windows(
        decoder, config, default=[window is not None] * decoder.num_layers, window=window
    )
    return replace(
        decoder,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        has_gates=False,
        norm="layer",
        has_norm_bias=True,
        names=_NAMES,
    )
