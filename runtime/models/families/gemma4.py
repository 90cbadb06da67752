"""Gemma 4: Gemma 3 with larger heads in layers without a window, values normed, KV that later
layers share; of the small ones an embedding of the token for each layer, of the mixture experts
beside the dense block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....kernels.model_options import AttentionOptions, RoutingOptions
from ...checkpoint.config.fields import Fields
from ...checkpoint.config.model_config import DecoderConfig, ExpertsConfig
from ...checkpoint.config.rope_scaling import RopeKind, RopeScaling
from ...checkpoint.config.varied_layers import VariedLayers
from .decoder import MAX_HEAD_DIM, read_text_half, with_experts, with_windows
from .gemma import read_gemma_layers
from .gemma3n import kv_sources, seeing_and_hearing

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "global_head_dim": 512,
}
_PERIOD = 6  # every so manieth layer has no window, if config.json does not list them
_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
    },
}  # fmt: skip


def read_gemma4(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    ropes = config.nested("rope_parameters") or Fields(config.file, _ROPES)
    plain = {"rope_parameters": None, "rope_scaling": None}
    decoder = read_gemma_layers(Fields(config.file, {**config.values, **plain}), architecture)
    last = decoder.num_layers - 1  # never has a window
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        types = [*types[:-1], "full_attention"]
    decoder = with_windows(
        decoder,
        Fields(config.file, {**config.values, "layer_types": types}),
        default=[(i + 1) % _PERIOD != 0 and i != last for i in range(decoder.num_layers)],
        window=config.optional_integer("sliding_window"),
        options=AttentionOptions(scale=1.0),
    )
    decoder = _with_ropes(decoder, ropes)
    decoder = replace(decoder, varied=_varied(config, decoder))
    assert decoder.varied is not None, "it was just set"
    decoder = replace(
        _with_kinds_of_heads(decoder, decoder.varied),
        head_dim=max(decoder.varied.head_dims),
        num_kv_heads=max(decoder.varied.num_kv_heads),
    )
    return _with_experts(decoder, config) if config.flag("enable_moe_block", False) else decoder


def read_gemma4_with_images(config: Fields, architecture: str) -> DecoderConfig:
    return seeing_and_hearing(
        read_text_half(config, lambda text: read_gemma4(text, architecture), is_tied=True)
    )


def _with_kinds_of_heads(decoder: DecoderConfig, varied: VariedLayers) -> DecoderConfig:
    """Layers of one kind of attention have heads of one size and as many of KV."""
    shapes = zip(decoder.layer_kinds, varied.head_dims, varied.num_kv_heads, strict=True)
    of_layer = list(shapes)
    kinds = list(dict.fromkeys(of_layer))
    return replace(
        decoder,
        attention_kinds=tuple(decoder.attention_kinds[kind] for kind, _, _ in kinds),
        kind_of_layer=tuple(kinds.index(each) for each in of_layer),
    )


def _with_ropes(decoder: DecoderConfig, ropes: Fields) -> DecoderConfig:
    """Of a head without a window only some pairs turn, the fastest."""
    full = ropes.nested("full_attention") or Fields(ropes.file, _ROPES["full_attention"])
    sliding = ropes.nested("sliding_attention") or Fields(ropes.file, _ROPES["sliding_attention"])
    sliding.restrict("rope_type", "default")
    full.restrict("rope_type", "proportional", "default")
    length, scaling = decoder.max_position_embeddings, None
    if full.get("rope_type") == "proportional":
        share = full.number("partial_rotary_factor", 1.0)
        if share > 1:
            raise full.fail("partial_rotary_factor", "a number in (0, 1]")
        scaling = RopeScaling(
            RopeKind.PROPORTIONAL, full.number("factor", 1.0), length, length, rotated_share=share
        )
    return replace(
        decoder,
        rope_theta=full.number("rope_theta", 1e6),
        rope_scaling=scaling,
        window_rope_theta=sliding.number("rope_theta", 1e4),
    )


def _varied(config: Fields, decoder: DecoderConfig) -> VariedLayers:
    layers = range(decoder.num_layers)
    sources = kv_sources(config, decoder)
    heads = [_heads(config, decoder, layer) for layer in layers]
    for layer, source in enumerate(sources):
        if heads[layer] != heads[source]:
            expected = f"heads of layer {layer} like those of layer {source}, whose KV it shares"
            raise config.fail("per_layer_config", expected)
    size = config.integer("intermediate_size")
    is_wide = config.flag("use_double_wide_mlp", False)
    own_keys = config.flag("attention_k_eq_v", False)
    has_inputs = bool(config.get("hidden_size_per_layer_input"))
    return VariedLayers(
        head_dims=tuple(head_dim for _, head_dim in heads),
        num_kv_heads=tuple(number for number, _ in heads),
        kv_sources=sources,
        has_values=tuple(not own_keys or decoder.has_window(layer) for layer in layers),
        intermediate_sizes=tuple(
            size * 2 if is_wide and sources[layer] != layer else size for layer in layers
        ),
        sparsities=(0.0,) * decoder.num_layers,
        token_input_size=config.integer("hidden_size_per_layer_input") if has_inputs else 0,
        token_input_vocab=config.integer("vocab_size_per_layer_input"),
        has_output_scalars=True,
    )


def _heads(config: Fields, decoder: DecoderConfig, layer: int) -> tuple[int, int]:
    """(number of KV heads, size of a head): as listed for the layer, or, in the layout that is
    published, by whether it has a window."""
    listed = config.nested("per_layer_config")
    own: Fields | None = None
    if listed is not None:
        own = _of_layer(listed, layer)
    elif not decoder.has_window(layer):
        own = Fields(config.file, {"head_dim": config.get("global_head_dim")})
        number = config.get("num_global_key_value_heads")
        if config.flag("attention_k_eq_v", False) and number is not None:
            own = Fields(config.file, {**own.values, "num_key_value_heads": number})
    if own is None:
        return decoder.num_kv_heads, decoder.head_dim
    head_dim = own.integer("head_dim", decoder.head_dim, most=MAX_HEAD_DIM)
    number = own.integer("num_key_value_heads", decoder.num_kv_heads, most=decoder.num_heads)
    if head_dim % 2:
        raise own.fail("head_dim", "an even number, as rotary embeddings need")
    if decoder.num_heads % number:
        raise own.fail("num_key_value_heads", f"a divisor of {decoder.num_heads}")
    return number, head_dim


def _of_layer(listed: Fields, layer: int) -> Fields | None:
    """Layers are written with leading zeros, as wide as the last one."""
    for name in listed.values:
        if not name.isdecimal():
            raise listed.fail(name, "no such field, but numbers of layers")
    names = [name for name in listed.values if int(name) == layer]
    return listed.nested(names[0]) if names else None


def _with_experts(decoder: DecoderConfig, config: Fields) -> DecoderConfig:
    """In all layers; the dense block beside them counts as an expert that every token takes."""
    experts = ExpertsConfig(
        layers=tuple(range(decoder.num_layers)),
        num_experts=config.integer("num_experts"),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=RoutingOptions(config.integer("top_k_experts"), is_normalized=True),
        shared_intermediate_size=decoder.intermediate_size,
    )
    return with_experts(decoder, config, experts, num_chosen="top_k_experts")
