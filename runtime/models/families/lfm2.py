"""LFM2: short convolutions in most layers, attention in the others. LFM2-MoE: with experts in all
but the first."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    LayerNames,
    RecurrentConfig,
    ShortConvConfig,
)
from .decoder import layers_of_type, read_decoder, with_experts

_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "norm_eps": 1e-5,
    "eos_token_id": 2,
}
_NAMES = LayerNames(
    input_norm="operator_norm",
    attention_output="out_proj",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    recurrence="conv",
    middle_norm="ffn_norm",
    feed_forward="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
)
_EXPERT_DEFAULTS = {
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "intermediate_size": 7168,
}
_EXPERT_NAMES = ExpertNames(
    block="feed_forward",
    selection_bias="expert_bias",
    gate="experts.{}.w1",
    up="experts.{}.w3",
    down="experts.{}.w2",
)


def read_lfm2(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    changed = {
        "rms_norm_eps": config.number("norm_eps", 1e-5),
        "intermediate_size": _feed_forward_size(config),
        # An older name.
        "tie_word_embeddings": config.flag(
            "tie_embedding", config.flag("tie_word_embeddings", True)
        ),
    }
    decoder = read_decoder(Fields(config.file, {**config.values, **changed}), architecture)
    full = config.token_ids("full_attn_idxs") or tuple(range(decoder.num_layers))
    default = tuple(index for index in range(decoder.num_layers) if index not in full)
    layers = layers_of_type(config, decoder.num_layers, "conv", default)
    mixer = ShortConvConfig(
        config.integer("conv_L_cache", 3, most=64), config.flag("conv_bias", False)
    )
    if mixer.kernel_size < 2:
        raise config.fail("conv_L_cache", "an integer in [2, 64]")
    return replace(
        decoder,
        query_key_norm="head",
        recurrent=RecurrentConfig(layers, mixer) if layers else None,
        names=_NAMES,
        final_norm="embedding_norm",
    )


def read_lfm2_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_EXPERT_DEFAULTS)
    plain = {"block_auto_adjust_ff_dim": False, "block_ff_dim": None}
    decoder = read_lfm2(Fields(config.file, {**config.values, **plain}), architecture)
    experts = ExpertsConfig(
        layers=tuple(range(config.count("num_dense_layers"), decoder.num_layers)),
        num_experts=config.integer("num_experts"),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=RoutingOptions(
            config.integer("num_experts_per_tok"),
            scoring="sigmoid",
            is_normalized=config.flag("norm_topk_prob", True),
            weight_factor=config.number("routed_scaling_factor", 1.0),
        ),
        has_selection_bias=config.flag("use_expert_bias", True),
        names=_EXPERT_NAMES,
    )
    return with_experts(decoder, config, experts)


def _feed_forward_size(config: Fields) -> int:
    """As Llama 1 had it: two thirds, times a factor, rounded up."""
    named = "block_ff_dim" if config.get("block_ff_dim") is not None else "intermediate_size"
    size = config.integer(named, 12288)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = config.optional_number("block_ffn_dim_multiplier")
    if factor is None:
        return size
    multiple = config.integer("block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple
