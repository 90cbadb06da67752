"""Qwen3-Next and Qwen3.5: gated delta nets in three of four layers, else gated attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ....kernels.model_options import RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    GatedDeltaConfig,
    PredictorConfig,
    RecurrentConfig,
)
from .decoder import layers_of_type, read_decoder, with_experts

_MAX_HEADS = 1 << 12
_MAX_DIM = 1 << 12
_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_NEXT_DEFAULTS = {
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
}
_MOE_DEFAULTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "norm_topk_prob": True,
}
_NAMES = ExpertNames(shared="shared_expert")
_PREDICTOR = PredictorConfig(
    layer="mtp.layers.0",
    token_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    merge="mtp.fc",
    norm="mtp.norm",
    weights=("mtp.",),
    hands_on_normed=True,
)
# Positions in an image's grid; all three are a text's own position.
_GRID_FIELDS = ("mrope_section", "mrope_interleaved")


def read_qwen3_next(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults({**_DEFAULTS, **_NEXT_DEFAULTS, "intermediate_size": 5632})
    decoder = replace(
        _read(config, architecture, is_fused=True),
        unread_weights=_PREDICTOR.weights,
        predictor=_PREDICTOR,
    )
    return with_experts(decoder, config, _experts(config, decoder))


def read_qwen3_5(config: Fields, architecture: str) -> DecoderConfig:
    """A checkpoint of the text's decoder alone."""
    config = _without_grid(config.with_defaults({**_DEFAULTS, "num_key_value_heads": 4}))
    return replace(
        _read(config, architecture, is_fused=False),
        unread_weights=_PREDICTOR.weights,
        predictor=_PREDICTOR if config.get("mtp_num_hidden_layers") != 0 else None,
    )


def read_qwen3_5_moe(config: Fields, architecture: str) -> DecoderConfig:
    """Experts in every layer, and no dense block."""
    size = {"intermediate_size": config.integer("shared_expert_intermediate_size", 512)}
    config = Fields(config.file, {**_MOE_DEFAULTS, **config.values, **size})
    decoder = read_qwen3_5(config, architecture)
    return with_experts(decoder, config, _experts(config, decoder))


def read_qwen3_5_with_images(config: Fields, architecture: str) -> DecoderConfig:
    """The text's decoder of a checkpoint that also has a vision tower, which is not loaded."""
    return _text_of(config, architecture, read_qwen3_5)


def read_qwen3_5_moe_with_images(config: Fields, architecture: str) -> DecoderConfig:
    """Likewise."""
    return _text_of(config, architecture, read_qwen3_5_moe)


def _text_of(
    config: Fields, architecture: str, read: Callable[[Fields, str], DecoderConfig]
) -> DecoderConfig:
    text = config.nested("text_config")
    if text is None:
        raise config.fail("text_config", "an object")
    outer: dict[str, Any] = {
        name: config.get(name)
        for name in ("tie_word_embeddings", "eos_token_id")
        if text.get(name) is None and config.get(name) is not None
    }
    decoder = read(text.with_defaults(outer), architecture)
    return replace(
        decoder,
        weight_prefix="language_model.",
        unread_weights=(*_PREDICTOR.weights, "vision_tower.", "visual."),
    )


def _read(config: Fields, architecture: str, *, is_fused: bool) -> DecoderConfig:
    config.restrict("hidden_act", "silu", "swish")
    decoder = read_decoder(config, architecture, can_rotate_in_part=True)
    bias = config.flag("attention_bias", False)
    period = config.integer("full_attention_interval", 4)
    default = tuple(i for i in range(decoder.num_layers) if (i + 1) % period)
    layers = layers_of_type(config, decoder.num_layers, "linear_attention", default)
    mixer = GatedDeltaConfig(
        kernel_size=config.integer("linear_conv_kernel_dim", most=64),
        num_key_heads=config.integer("linear_num_key_heads", most=_MAX_HEADS),
        num_value_heads=config.integer("linear_num_value_heads", most=_MAX_HEADS),
        key_dim=config.integer("linear_key_head_dim", most=_MAX_DIM),
        value_dim=config.integer("linear_value_head_dim", most=_MAX_DIM),
        is_fused=is_fused,
    )
    if mixer.kernel_size < 2:
        raise config.fail("linear_conv_kernel_dim", "an integer in [2, 64]")
    if mixer.num_value_heads % mixer.num_key_heads:
        expected = f"a multiple of linear_num_key_heads={mixer.num_key_heads}"
        raise config.fail("linear_num_value_heads", expected)
    return replace(
        decoder,
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm="head",
        has_unit_offset_norms=True,
        has_attention_gate=True,
        recurrent=RecurrentConfig(layers, mixer) if layers else None,
    )


def _without_grid(config: Fields) -> Fields:
    """Without the fields of the rotary embedding that matter for images alone."""
    changed = {}
    for field in ("rope_parameters", "rope_scaling"):
        nested = config.nested(field)
        if nested is not None:
            kept = {k: v for k, v in nested.values.items() if k not in _GRID_FIELDS}
            changed[field] = kept
    return Fields(config.file, {**config.values, **changed})


def _experts(config: Fields, decoder: DecoderConfig) -> ExpertsConfig:
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.token_ids("mlp_only_layers")
    return ExpertsConfig(
        layers=tuple(
            layer
            for layer in range(decoder.num_layers)
            if layer not in dense and (layer + 1) % step == 0
        ),
        num_experts=config.integer("num_experts"),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=RoutingOptions(
            config.integer("num_experts_per_tok"),
            is_normalized=config.flag("norm_topk_prob", True),
        ),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size"),
        has_shared_gate=True,
        names=_NAMES,
    )
