"""Kimi Linear: the delta rule with a decay for each number of a key in three of four layers, else
latent attention without positions; the experts of DeepSeek-V3 (Kimi team, "Kimi Linear", 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    GatedDeltaConfig,
    LayerNames,
    RecurrentConfig,
)
from .decoder import layers_of_type, with_experts
from .deepseek import read_latent_decoder, routing_of_v3, with_listed_layers

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "eos_token_id": 163586,
}
# Published names, and those of transformers' classes.
_ALIASES = {
    "max_position_embeddings": ("model_max_length", 1048576),
    "norm_topk_prob": ("moe_renormalize", True),
    "n_group": ("num_expert_group", 1),
    "n_routed_experts": ("num_experts", 256),
    "num_experts_per_tok": ("num_experts_per_token", 8),
    "n_shared_experts": ("num_shared_experts", 1),
    "topk_group": ("topk_group", 1),
    "routed_scaling_factor": ("routed_scaling_factor", 2.446),
}
_NAMES = LayerNames(recurrence="self_attn")
_EXPERT_NAMES = ExpertNames(
    block="block_sparse_moe",
    gate="experts.{}.w1",
    up="experts.{}.w3",
    down="experts.{}.w2",
)
_MAX_HEADS = 1 << 12
_MAX_DIM = 1 << 12


def read_kimi_linear(config: Fields, architecture: str) -> DecoderConfig:
    config = _with_one_name_each(config.with_defaults(_DEFAULTS))
    config.restrict("moe_router_activation_func", "sigmoid")
    config.restrict("moe_layer_freq", 1)
    config.restrict("mla_use_nope", True)
    own = {"rope_interleave": False, "rope_scaling": None, "rope_parameters": None}
    decoder = read_latent_decoder(Fields(config.file, {**config.values, **own}), architecture)
    layers = _recurrent_layers(config, decoder.num_layers)
    decoder = replace(
        decoder,
        layers_without_rope=tuple(range(decoder.num_layers)),
        recurrent=RecurrentConfig(layers, _mixer(config)) if layers else None,
        names=_NAMES,
    )
    experts = with_listed_layers(config, decoder, _experts(config, decoder.num_layers))
    return with_experts(decoder, config, experts)


def _with_one_name_each(config: Fields) -> Fields:
    changed = {}
    for name, (published, default) in _ALIASES.items():
        values = (config.get(name), config.get(published), default)
        changed[name] = next(value for value in values if value is not None)
    return Fields(config.file, {**config.values, **changed})


def _recurrent_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    """Published lists count layers from 1."""
    default = [layer for layer in range(num_layers) if layer == 0 or layer % 4]
    published = config.nested("linear_attn_config")
    if config.get("layer_types") is None and published is not None:
        listed = published.token_ids("kda_layers")
        full = published.token_ids("full_attn_layers")
        if sorted((*listed, *full)) != list(range(1, num_layers + 1)):
            expected = f"with full_attn_layers each of 1 to {num_layers} once"
            raise published.fail("kda_layers", expected)
        default = sorted(layer - 1 for layer in listed)
    return layers_of_type(config, num_layers, "linear_attention", default)


def _mixer(config: Fields) -> GatedDeltaConfig:
    config.restrict("hidden_act", "silu", "swish")  # the convolution's, too
    published = config.nested("linear_attn_config") or Fields(config.file, {})
    names = ("short_conv_kernel_size", "num_heads", "head_dim")
    own = ("linear_conv_kernel_dim", "linear_num_heads", "linear_head_dim")
    limits = ((4, 64), (32, _MAX_HEADS), (128, _MAX_DIM))
    kernel_size, num_heads, head_dim = (
        published.integer(name, config.integer(other, default, most=most), most=most)
        for name, other, (default, most) in zip(names, own, limits, strict=True)
    )
    if kernel_size < 2:
        raise config.fail("linear_conv_kernel_dim", "an integer in [2, 64]")
    return GatedDeltaConfig(
        kernel_size, num_heads, num_heads, head_dim, head_dim, has_channel_decays=True
    )


def _experts(config: Fields, num_layers: int) -> ExpertsConfig:
    size = config.integer("moe_intermediate_size")
    return ExpertsConfig(
        layers=tuple(range(config.count("first_k_dense_replace"), num_layers)),
        num_experts=config.integer("n_routed_experts"),
        intermediate_size=size,
        routing=routing_of_v3(config),
        shared_intermediate_size=size * config.count("n_shared_experts"),
        has_selection_bias=True,
        names=_EXPERT_NAMES,
    )
