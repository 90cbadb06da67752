"""OLMoE: Llama with experts in every layer, and norms over all query heads and over all key heads
together."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertsConfig
from .decoder import with_experts
from .llama import read_llama

_DEFAULTS = {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
}


def read_olmoe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    config.restrict("clip_qkv")
    decoder = replace(read_llama(config, architecture), query_key_norm="whole")
    experts = ExpertsConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=config.integer("num_experts"),
        intermediate_size=decoder.intermediate_size,
        routing=RoutingOptions(
            config.integer("num_experts_per_tok"),
            is_normalized=config.flag("norm_topk_prob", False),
        ),
    )
    return with_experts(decoder, config, experts)
