"""Phi-1, Phi-1.5 and Phi-2: both blocks side by side after one LayerNorm, heads rotated in part, a
feed-forward block without gates, and biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, LayerNames
from .decoder import read_decoder

_DEFAULTS = {
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu_new",
    "eos_token_id": 2,
}
_NAMES = LayerNames(attention_output="dense", up="fc1", down="fc2")


def read_phi(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    config.restrict("qk_layernorm", False)
    config.restrict("hidden_act", "gelu_new", "gelu_pytorch_tanh")  # one function
    own = {
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": config.number("layer_norm_eps", 1e-5),
    }
    config = Fields(config.file, {**config.values, **own})
    return replace(
        read_decoder(config, architecture, can_rotate_in_part=True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        logits_bias=True,
        has_gates=False,
        norm="layer",
        has_norm_bias=True,
        norm_placement="parallel",
        names=_NAMES,
        final_norm="final_layernorm",
    )
