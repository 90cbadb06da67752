"""gpt-oss: experts with biases and clamped gates in every layer, a learned sink for each head, a
window in every second layer, YaRN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....kernels.model_options import ClampedSwiGLU, RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertNames, ExpertsConfig
from .decoder import read_decoder, with_experts, with_windows

_DEFAULTS: dict[str, Any] = {
    "num_hidden_layers": 36,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_NAMES = ExpertNames(router="router", down="experts.down_proj")


def read_gpt_oss(config: Fields, architecture: str) -> DecoderConfig:
    """A token's experts are those of the largest logits, weighted by the softmax of these alone,
    which is the normalized softmax of all."""
    config = config.with_defaults(_DEFAULTS)
    config.restrict("hidden_act", "silu")
    decoder = read_decoder(config, architecture)
    bias = config.flag("attention_bias", True)
    decoder = replace(decoder, qkv_bias=bias, output_bias=bias, has_sink_logits=True)
    decoder = with_windows(
        decoder,
        config,
        default=[index % 2 == 0 for index in range(decoder.num_layers)],
        window=config.optional_integer("sliding_window"),
    )
    experts = ExpertsConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=config.integer("num_local_experts"),
        intermediate_size=decoder.intermediate_size,
        routing=RoutingOptions(config.integer("num_experts_per_tok"), is_normalized=True),
        is_stacked=True,
        has_biases=True,
        clamped=ClampedSwiGLU(
            config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
        ),
        names=_NAMES,
    )
    return with_experts(decoder, config, experts)
