"""Nemotron: LayerNorm by 1 + weight, squared ReLUs without gates, heads rotated in part. Nemotron-H
and Nemotron 3: Mamba-2, attention without positions, feed-forward blocks or experts, one of them a
layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    Block,
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    LayerNames,
    Mamba2Config,
    RecurrentConfig,
)
from .decoder import MAX_LAYERS, read_decoder, with_experts
from .deepseek import routing_of_v3

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 32,
    "num_attention_heads": 48,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.5,
    "hidden_act": "relu2",
    "eos_token_id": 3,
}
_HYBRID_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "eos_token_id": 2,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1,
    "topk_group": 1,
}
_NAMES = LayerNames(input_norm="norm", attention="mixer", recurrence="mixer", feed_forward="mixer")
_EXPERT_NAMES = ExpertNames(block="mixer")
_PATTERN: dict[str, Block] = {"M": "recurrent", "E": "experts", "*": "attention", "-": "dense"}
_KINDS: dict[str, Block] = {
    "linear_attention": "recurrent", "mamba": "recurrent", "moe": "experts", "mlp": "dense",
    "full_attention": "attention", "attention": "attention",
}  # fmt: skip
_MAX_HEADS = 1 << 12
_MAX_DIM = 1 << 12


def read_nemotron(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    config.restrict("hidden_act", "relu2")
    own = {"hidden_act": None, "rms_norm_eps": config.number("norm_eps", 1e-5)}
    config = Fields(config.file, {**config.values, **own})
    bias = config.flag("attention_bias", False)
    return replace(
        read_decoder(config, architecture, can_rotate_in_part=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        has_gates=False,
        plain_activation="relu_squared",
        norm="layer",
        has_norm_bias=True,
        has_unit_offset_norms=True,
    )


def read_nemotron_hybrid(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_HYBRID_DEFAULTS)
    config.restrict("mlp_hidden_act", "relu2")
    config.restrict("mamba_hidden_act", "silu")
    config.restrict("attention_bias", False)
    config.restrict("sliding_window")
    blocks = _blocks(config)
    own = {
        "num_hidden_layers": len(blocks),
        "layer_types": None,
        "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5),
    }
    decoder = read_decoder(Fields(config.file, {**config.values, **own}), architecture)
    layers = tuple(i for i, block in enumerate(blocks) if block == "recurrent")
    decoder = replace(
        decoder,
        mlp_bias=config.flag("mlp_bias", False),
        has_gates=False,
        plain_activation="relu_squared",
        layers_without_rope=tuple(range(len(blocks))),
        single_blocks=blocks,
        recurrent=RecurrentConfig(layers, _mamba2(config)) if layers else None,
        names=_NAMES,
        final_norm="norm_f",
        unread_weights=("mtp.",),
    )
    if "experts" not in blocks:
        return decoder
    return with_experts(decoder, config, _experts(config, blocks))


def _blocks(config: Fields) -> tuple[Block, ...]:
    """By names, or by a pattern of a letter a layer."""
    pattern, names = config.get("hybrid_override_pattern"), config.get("layers_block_type")
    name, table = "layers_block_type", _KINDS
    if names is None and config.get("layer_types") is not None:
        name, names = "layer_types", config.get("layer_types")
    if names is None and isinstance(pattern, str):
        name, names, table = "hybrid_override_pattern", list(pattern), _PATTERN
    if not isinstance(names, list) or not 1 <= len(names) <= MAX_LAYERS:
        raise config.fail(name, f"a list of 1 to {MAX_LAYERS} names")
    if any(not isinstance(each, str) or each not in table for each in names):
        raise config.fail(name, f"names among {', '.join(table)}")
    blocks = tuple(table[each] for each in names)
    if "attention" not in blocks:
        raise config.fail(name, "at least one layer of attention")
    return blocks


def _mamba2(config: Fields) -> Mamba2Config:
    """Steps are bounded from below alone, as in transformers."""
    mixer = Mamba2Config(
        kernel_size=config.integer("conv_kernel", most=64),
        num_heads=config.integer("mamba_num_heads", most=_MAX_HEADS),
        num_groups=config.integer("n_groups", most=_MAX_HEADS),
        state_dim=config.integer("ssm_state_size", most=_MAX_DIM),
        head_dim=config.integer("mamba_head_dim", most=_MAX_DIM),
        has_convolution_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
        step_limit=(config.number("time_step_min", 0.001), math.inf),
    )
    if mixer.kernel_size < 2:
        raise config.fail("conv_kernel", "an integer in [2, 64]")
    if mixer.num_heads % mixer.num_groups:
        raise config.fail("n_groups", f"a divisor of mamba_num_heads={mixer.num_heads}")
    return mixer


def _experts(config: Fields, blocks: tuple[Block, ...]) -> ExpertsConfig:
    """DeepSeek-V3's routing, of experts without gates."""
    latent = config.optional_integer("moe_latent_size")
    config.restrict("n_shared_experts", 1)
    return ExpertsConfig(
        layers=tuple(i for i, block in enumerate(blocks) if block == "experts"),
        num_experts=config.integer("n_routed_experts"),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=routing_of_v3(config),
        shared_intermediate_size=config.integer("moe_shared_expert_intermediate_size"),
        has_selection_bias=True,
        has_gates=False,
        latent_size=latent or 0,
        names=_EXPERT_NAMES,
    )
