"""Llama 4: attention in chunks with rotary embedding in three of four layers, else to all tokens
and without; queries of the latter scaled by their position; experts whose inputs are weighed, and
one that every token takes. It is published with a vision tower, which is not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....kernels.model_options import AttentionOptions, RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import (
    DecoderConfig,
    ExpertNames,
    ExpertsConfig,
    LayerNames,
    QueryScaling,
)
from .decoder import read_decoder, read_text_half, with_experts
from .smollm3 import layers_without_rope

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
    "floor_scale": 8192,
    "eos_token_id": 2,
}
_NAMES = LayerNames(feed_forward="feed_forward")
_EXPERT_NAMES = ExpertNames(
    block="feed_forward", router="router", down="experts.down_proj", shared="shared_expert"
)
_TYPES = ("full_attention", "chunked_attention")


def read_llama4(config: Fields, architecture: str) -> DecoderConfig:
    """An expert has the config's intermediate size, a dense block `intermediate_size_mlp`."""
    config = config.with_defaults(_DEFAULTS)
    size = config.integer("intermediate_size")
    dense = {"intermediate_size": config.integer("intermediate_size_mlp")}
    decoder = read_decoder(Fields(config.file, {**config.values, **dense}), architecture)
    if decoder.rope_scaling is not None and decoder.rope_scaling.attention_factor != 1.0:
        raise config.fail("rope_scaling", "one that keeps the length of queries and keys")
    bias = config.flag("attention_bias", False)
    without_rope = layers_without_rope(_without_empty_list(config), decoder.num_layers)
    decoder = replace(
        decoder,
        qkv_bias=bias,
        output_bias=bias,
        has_interleaved_rope=True,
        layers_without_rope=without_rope,
        query_key_norm="unit" if config.flag("use_qk_norm", True) else None,
        query_scaling=_query_scaling(config),
        names=_NAMES,
    )
    return with_experts(_with_chunks(decoder, config), config, _experts(config, decoder, size))


def read_llama4_with_images(config: Fields, architecture: str) -> DecoderConfig:
    decoder = read_text_half(config, lambda text: read_llama4(text, architecture), is_tied=False)
    return replace(decoder, unread_weights=("vision_model.", "multi_modal_projector."))


def _without_empty_list(config: Fields) -> Fields:
    """As published, an empty list means the default."""
    return config if config.get("no_rope_layers") else _changed(config, no_rope_layers=None)


def _changed(config: Fields, **fields: Any) -> Fields:
    return Fields(config.file, {**config.values, **fields})


def _query_scaling(config: Fields) -> QueryScaling | None:
    tuning = config.get("attn_temperature_tuning")
    if isinstance(tuning, int):  # a number in published configs
        config = _changed(config, attn_temperature_tuning=tuning > 0)
    if not config.flag("attn_temperature_tuning", True):
        return None
    beta = config.number("attn_scale", 0.1)
    return QueryScaling(beta, config.integer("floor_scale"), offset=1, is_without_rope=True)


def _with_chunks(decoder: DecoderConfig, config: Fields) -> DecoderConfig:
    """Layers with rotary embedding attend in chunks, if config.json does not list them."""
    types = config.get("layer_types")
    if types is None:
        types = [_TYPES[i not in decoder.layers_without_rope] for i in range(decoder.num_layers)]
    if not isinstance(types, list) or len(types) != decoder.num_layers:
        raise config.fail("layer_types", f"a list of {decoder.num_layers} names")
    if any(each not in _TYPES for each in types):
        raise config.fail("layer_types", f"names among {', '.join(_TYPES)}")
    options = {
        "full_attention": AttentionOptions(),
        "chunked_attention": AttentionOptions(chunk=config.integer("attention_chunk_size")),
    }
    kinds = sorted(set(types))
    return replace(
        decoder,
        attention_kinds=tuple(options[kind] for kind in kinds),
        kind_of_layer=tuple(kinds.index(each) for each in types),
    )


def _experts(config: Fields, decoder: DecoderConfig, size: int) -> ExpertsConfig:
    return ExpertsConfig(
        layers=_expert_layers(config, decoder.num_layers),
        num_experts=config.integer("num_local_experts"),
        intermediate_size=size,
        routing=RoutingOptions(config.integer("num_experts_per_tok"), scoring="sigmoid"),
        shared_intermediate_size=size,
        is_stacked=True,
        is_halved=True,
        weighs_inputs=True,
        names=_EXPERT_NAMES,
    )


def _expert_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    listed = config.get("moe_layers")
    if listed is None:
        step = config.integer("interleave_moe_layer_step", 1)
        return tuple(range(step - 1, num_layers, step))
    if not isinstance(listed, list) or any(each not in range(num_layers) for each in listed):
        raise config.fail("moe_layers", f"a list of integers in [0, {num_layers - 1}]")
    return tuple(sorted(set(listed)))
