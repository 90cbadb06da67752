"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import AttentionOptions, RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertNames, ExpertsConfig
from .decoder import read_decoder, with_experts

_DEFAULTS = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_id": 2,
}
_NAMES = ExpertNames(
    block="block_sparse_moe",
    gate="experts.{}.w1",
    up="experts.{}.w3",
    down="experts.{}.w2",
)


def read_mixtral(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    decoder = read_decoder(config, architecture)
    experts = ExpertsConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=config.integer("num_local_experts"),
        intermediate_size=decoder.intermediate_size,
        routing=RoutingOptions(config.integer("num_experts_per_tok"), is_normalized=True),
        names=_NAMES,
    )
    window = AttentionOptions(window=config.optional_integer("sliding_window"))
    return with_experts(replace(decoder, attention_kinds=(window,)), config, experts)
