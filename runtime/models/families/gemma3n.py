"""Gemma 3n: Gemma 3 with several residual streams, an embedding of the token for each layer, KV
that later layers share, and gates of which most are cut to zero in the first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....kernels.model_options import AttentionOptions
from ...checkpoint.config.fields import Fields, is_finite
from ...checkpoint.config.model_config import DecoderConfig
from ...checkpoint.config.varied_layers import AltUpConfig, VariedLayers
from .decoder import MAX_LAYERS, read_text_half, with_window_rope, with_windows
from .gemma import read_gemma_layers

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
_UNREAD = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_SPARSE_LAYERS, _SPARSITY = 10, 0.95  # where config.json does not list them
_MAX_STREAMS = 64


def read_gemma3n(config: Fields, architecture: str) -> DecoderConfig:
    config = config.with_defaults(_DEFAULTS)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS)
    sizes = _sizes(config, num_layers)
    config = Fields(config.file, {**config.values, "intermediate_size": max(sizes)})
    decoder = with_window_rope(
        config,
        lambda fields: read_gemma_layers(fields, architecture),
        window_theta="rope_local_base_freq",
    )
    decoder = with_windows(
        decoder,
        config,
        default=[(index + 1) % 5 != 0 for index in range(num_layers)],
        window=config.optional_integer("sliding_window"),
        options=AttentionOptions(scale=1.0),
    )
    varied = VariedLayers(
        head_dims=(decoder.head_dim,) * num_layers,
        num_kv_heads=(decoder.num_kv_heads,) * num_layers,
        kv_sources=kv_sources(config, decoder),
        has_values=(True,) * num_layers,
        intermediate_sizes=sizes,
        sparsities=_sparsities(config, num_layers),
        token_input_size=config.integer("hidden_size_per_layer_input"),
        token_input_vocab=config.integer("vocab_size_per_layer_input"),
        altup=_altup(config),
    )
    return replace(decoder, varied=varied)


def read_gemma3n_with_images(config: Fields, architecture: str) -> DecoderConfig:
    return seeing_and_hearing(
        read_text_half(config, lambda text: read_gemma3n(text, architecture), is_tied=True)
    )


def seeing_and_hearing(decoder: DecoderConfig) -> DecoderConfig:
    """The text half of a model of images and sound."""
    return replace(decoder, unread_weights=_UNREAD)


def kv_sources(config: Fields, decoder: DecoderConfig) -> tuple[int, ...]:
    """The last layers attend to the KV of the last one of their kind before them."""
    num_layers, num_shared = decoder.num_layers, config.count("num_kv_shared_layers")
    first = num_layers - num_shared
    sources = list(range(num_layers))
    for layer in range(max(first, 0), num_layers):
        alike = [i for i in range(first) if decoder.has_window(i) == decoder.has_window(layer)]
        if not alike:
            expected = "a number that leaves a layer of each kind before those that share its KV"
            raise config.fail("num_kv_shared_layers", expected)
        sources[layer] = alike[-1]
    return tuple(sources)


def _sizes(config: Fields, num_layers: int) -> tuple[int, ...]:
    """One for all layers, or a list."""
    listed = config.get("intermediate_size")
    if not isinstance(listed, list):
        return (config.integer("intermediate_size"),) * num_layers
    if len(listed) != num_layers:
        raise config.fail("intermediate_size", f"an integer, or a list of {num_layers}")
    by_name = Fields(config.file, {f"intermediate_size[{i}]": v for i, v in enumerate(listed)})
    return tuple(by_name.integer(name) for name in by_name.values)


def _sparsities(config: Fields, num_layers: int) -> tuple[float, ...]:
    listed = config.get("activation_sparsity_pattern")
    if listed is None:
        num_sparse = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
        return (_SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    if not isinstance(listed, Sequence) or len(listed) != num_layers:
        raise config.fail("activation_sparsity_pattern", f"a list of {num_layers} numbers")
    if not all(is_finite(each) and 0 <= each < 1 for each in listed):
        raise config.fail("activation_sparsity_pattern", "numbers in [0, 1)")
    return tuple(float(each) for each in listed)


def _altup(config: Fields) -> AltUpConfig:
    count = config.integer("altup_num_inputs", most=_MAX_STREAMS)
    active = config.count("altup_active_idx")
    if count < 2:
        raise config.fail("altup_num_inputs", f"an integer in [2, {_MAX_STREAMS}]")
    if active >= count:
        raise config.fail("altup_active_idx", f"an integer in [0, {count - 1}]")
    return AltUpConfig(
        num_streams=count,
        active_stream=active,
        has_output_scale=config.flag("altup_correct_scale", True),
        laurel_rank=config.integer("laurel_rank"),
    )
