"""Hunyuan: Llama with heads normed after their rotation. With experts: in every layer, one of them
shared."""

from __future__ import annotations

from dataclasses import replace

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import MAX_INTEGER, Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    LayerNames,
)
from .decoder import with_experts
from .llama import read_llama

_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 2}
_NAMES = LayerNames(query_norm="query_layernorm", key_norm="key_layernorm")
_EXPERT_NAMES = ExpertNames(router="gate.wg", shared="shared_mlp")


def read_hunyuan(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    for field in ("use_cla", "use_mla"):
        config.restrict(field, False)
    for field in ("use_qk_norm", "use_rotary_pos_emb"):
        config.restrict(field, True)
    config.restrict("mlp_bias", False)
    alpha, config = _without_alpha(config)
    decoder = read_llama(config, architecture)
    if alpha is not None and decoder.head_dim < 4:
        raise config.fail("head_dim", "4 or more where the rotary embedding has an alpha")
    stretch = 1.0 if alpha is None else alpha ** (decoder.head_dim / (decoder.head_dim - 2))
    return replace(
        decoder,
        rope_theta=decoder.rope_theta * stretch,
        query_key_norm="head",
        is_normed_after_rotation=True,
        names=_NAMES,
    )


def read_hunyuan_moe(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({"num_experts": 1, "moe_topk": 1})
    for field in ("group_limited_greedy", "moe_layer_num_skipped"):
        config.restrict(field, False)
    for field in ("use_mixed_mlp_moe", "norm_topk_prob"):
        config.restrict(field, True)
    config.restrict("routed_scaling_factor", False, 1)
    decoder = read_hunyuan(config, architecture)
    size = decoder.intermediate_size
    _of_all_layers(config, "num_shared_expert", 1, least=1, most=1)
    _of_all_layers(config, "moe_intermediate_size", size, least=size, most=size)
    experts = ExpertsConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=_of_all_layers(config, "num_experts", 1),
        intermediate_size=size,
        routing=RoutingOptions(_of_all_layers(config, "moe_topk", 1), is_normalized=True),
        shared_intermediate_size=size,
        names=_EXPERT_NAMES,
    )
    return with_experts(decoder, config, experts, num_chosen="moe_topk")


def _without_alpha(config: Fields) -> tuple[float | None, Fields]:
    """A "dynamic" scaling with a constant alpha, which does not depend on the length, and the
    config without it."""
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.nested(name)
        kind = None if rope is None else rope.get("rope_type") or rope.get("type")
        if rope is not None and kind == "dynamic" and rope.get("alpha"):
            plain = {"rope_theta": rope.get("rope_theta")}
            return rope.number("alpha", 1.0), Fields(config.file, {**config.values, name: plain})
    return None, config


def _of_all_layers(
    config: Fields, field: str, default: int, *, least: int = 1, most: int = MAX_INTEGER
) -> int:
    """An integer, or a list of equal ones, in [least, most]."""
    value = config.get(field)
    values = value if isinstance(value, list) and value else [default if value is None else value]
    is_integer = isinstance(values[0], int) and not isinstance(values[0], bool)
    if not is_integer or not least <= values[0] <= most or values.count(values[0]) < len(values):
        allowed = least if least == most else f"a positive integer up to {most:,}"
        raise config.fail(field, f"{allowed}, the same in every layer")
    return int(values[0])
