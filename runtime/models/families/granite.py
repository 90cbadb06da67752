"""Granite: Llama with multipliers of the embedding, the scores, the residuals and the logits.
Granite 3 with experts: in every layer, one of them shared or none. Granite 4 H: the same with
Mamba-2 in most layers."""

from __future__ import annotations

import math
from dataclasses import replace

from ....kernels.model_options import AttentionOptions, RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    LayerNames,
    Mamba2Config,
    RecurrentConfig,
)
from .decoder import MAX_LAYERS, layers_of_type, with_experts
from .llama import read_llama

_HYBRID_NAMES = LayerNames(
    recurrence="mamba", feed_forward="shared_mlp", gate_up="input_linear", down="output_linear"
)
_EXPERT_NAMES = ExpertNames(
    block="block_sparse_moe", router="router.layer", shared="shared_mlp", is_shared_beside=True
)
# What config.json has called the two kinds of layers.
_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_MAX_HEADS = 1 << 12
_MAX_DIM = 1 << 12


def read_granite(config: Fields, architecture: str) -> DecoderConfig:
    return replace(
        read_llama(config, architecture),
        attention_kinds=(AttentionOptions(scale=config.number("attention_multiplier", 1.0)),),
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        residual_multiplier=config.number("residual_multiplier", 1.0),
        logits_divisor=config.number("logits_scaling", 1.0),
    )


def read_granite_hybrid(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"num_local_experts": 8, "intermediate_size": 11008})
    shared = config.integer("shared_intermediate_size", 1024)
    changed = {"intermediate_size": shared, "layer_types": _layer_types(config)}
    experts = _experts(config, shared) if config.count("num_local_experts") else None
    config = Fields(config.file, {**config.values, **changed})
    decoder = read_granite(config, architecture)
    if experts is not None:
        decoder = with_experts(decoder, config, experts)
    all_layers = tuple(range(decoder.num_layers))
    layers = layers_of_type(config, decoder.num_layers, "linear_attention", all_layers)
    config.restrict("position_embedding_type", "nope", "rope")
    has_rope = config.get("position_embedding_type") == "rope"
    return replace(
        decoder,
        layers_without_rope=() if has_rope else all_layers,
        recurrent=RecurrentConfig(layers, _mamba2(config, decoder.hidden_size)) if layers else None,
        names=_HYBRID_NAMES,
    )


def read_granite_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(
        {"num_local_experts": 8, "intermediate_size": 11008, "shared_intermediate_size": 0}
    )
    decoder = replace(read_granite(config, architecture), names=_HYBRID_NAMES)
    experts = _experts(config, config.count("shared_intermediate_size"))
    return with_experts(decoder, config, experts)


def _experts(config: Fields, shared_size: int) -> ExpertsConfig:
    """In all layers. shared_size: of the expert that every token takes; 0: there is none."""
    return ExpertsConfig(
        layers=tuple(range(config.integer("num_hidden_layers", most=MAX_LAYERS))),
        num_experts=config.integer("num_local_experts"),
        intermediate_size=config.integer("intermediate_size"),
        routing=RoutingOptions(config.integer("num_experts_per_tok", 2), is_normalized=True),
        shared_intermediate_size=shared_size,
        names=_EXPERT_NAMES,
    )


def _layer_types(config: Fields) -> list[object] | None:
    names = config.get("layer_types")
    if names is None:
        names = config.get("layers_block_type")
    if not isinstance(names, list):
        return names  # type: ignore[no-any-return]  # refused with the others
    return [_KINDS.get(name, name) if isinstance(name, str) else name for name in names]


def _mamba2(config: Fields, hidden_size: int) -> Mamba2Config:
    config.restrict("hidden_act", "silu", "swish")  # the convolution's and the gates', too
    num_heads = config.integer("mamba_n_heads", 128, most=_MAX_HEADS)
    inner_size = config.integer("mamba_expand", 2, most=64) * hidden_size
    head_dim = config.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner_size // num_heads
    if head_dim * num_heads != inner_size:
        expected = f"mamba_expand * hidden_size / mamba_n_heads = {inner_size / num_heads:g}"
        raise config.fail("mamba_d_head", expected)
    mixer = Mamba2Config(
        kernel_size=config.integer("mamba_d_conv", 4, most=64),
        num_heads=num_heads,
        num_groups=config.integer("mamba_n_groups", 1, most=num_heads),
        state_dim=config.integer("mamba_d_state", 256, most=_MAX_DIM),
        head_dim=head_dim,
        has_convolution_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
        step_limit=_step_limit(config),
    )
    if mixer.kernel_size < 2:
        raise config.fail("mamba_d_conv", "an integer in [2, 64]")
    if num_heads % mixer.num_groups:
        raise config.fail("mamba_n_groups", f"a divisor of mamba_n_heads={num_heads}")
    return mixer


def _step_limit(config: Fields) -> tuple[float, float]:
    limit = config.get("time_step_limit")
    if limit is None:
        return 0.0, math.inf
    if not isinstance(limit, list) or len(limit) != 2:
        raise config.fail("time_step_limit", "two numbers")
    # As transformers 5 writes what JSON has no number for.
    least, most = (math.inf if each == {"__float__": "Infinity"} else each for each in limit)
    if not all(isinstance(each, int | float) for each in (least, most)) or not 0 <= least <= most:
        raise config.fail("time_step_limit", "two ascending numbers >= 0")
    return float(least), float(most)
