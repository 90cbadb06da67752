"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts in some layers."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertNames, ExpertsConfig
from .decoder import read_decoder, with_experts

_DEFAULTS_2 = {
    "max_position_embeddings": 32768,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
}
_NAMES_2 = ExpertNames(shared="shared_expert")
_DEFAULTS_3 = {"num_key_value_heads": 4, "max_position_embeddings": 32768}


def read_qwen2_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_2)
    decoder = replace(read_decoder(config, architecture), qkv_bias=config.flag("qkv_bias", True))
    shared = config.integer("shared_expert_intermediate_size")
    experts = replace(
        _experts(config, decoder),
        shared_intermediate_size=shared,
        has_shared_gate=True,
        names=_NAMES_2,
    )
    return with_experts(decoder, config, experts)


def read_qwen3_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS_3)
    decoder = read_decoder(config, architecture)
    bias = config.flag("attention_bias", False)
    decoder = replace(decoder, qkv_bias=bias, output_bias=bias, query_key_norm="head")
    return with_experts(decoder, config, _experts(config, decoder))


def _experts(config: Fields, decoder: DecoderConfig) -> ExpertsConfig:
    config.restrict("use_sliding_window", False)
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.token_ids("mlp_only_layers")
    # transformers 5 writes Qwen3-MoE's number under the other name.
    name = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    return ExpertsConfig(
        layers=tuple(
            layer
            for layer in range(decoder.num_layers)
            if layer not in dense and (layer + 1) % step == 0
        ),
        num_experts=config.integer(name),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=RoutingOptions(
            config.integer("num_experts_per_tok"),
            is_normalized=config.flag("norm_topk_prob", False),
        ),
    )
