"""Rotary embeddings that differ between layers with and without a window.

transformers 4   rope_theta and rope_scaling without window; a family's own field for the window
transformers 5   rope_parameters: {"full_attention": {...}, "sliding_attention": {...}}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...checkpoint.config.decoder_config import DecoderConfig
from ...checkpoint.config.fields import Fields


def with_window_rope(
    config: Fields, read: Callable[[Fields], DecoderConfig], *, window_theta: str
) -> DecoderConfig:
    """The result of `read` for the layers without a window, plus the rotary base of the windowed
    layers, which are never scaled.

    window_theta: the field of this base in the layout of transformers 4. That layout does not give
    the length before scaling: `max_position_embeddings` is the length after it.
    """
    nested = config.nested("rope_parameters")
    full: dict[str, Any] = {}
    window = {"rope_theta": config.number(window_theta, 1e4), "rope_scaling": None}
    if nested is not None and "full_attention" in nested.values:
        full |= _of(nested, "full_attention")
        window |= _of(nested, "sliding_attention")
    decoder = read(_changed(config, full))
    windowed = read(_changed(config, window))
    if windowed.rope_scaling is not None:
        raise config.fail("rope_parameters", "no scaling of layers with sliding_attention")
    scaling = decoder.rope_scaling
    if scaling is not None:
        scaling = replace(scaling, max_positions=decoder.max_position_embeddings)
    return replace(decoder, rope_scaling=scaling, window_rope_theta=windowed.rope_theta)


def _of(nested: Fields, name: str) -> dict[str, Any]:
    part = nested.nested(name)
    return {"rope_scaling": None, "rope_parameters": {} if part is None else dict(part.values)}


def _changed(config: Fields, changes: dict[str, Any]) -> Fields:
    return Fields(config.file, {**config.values, **changes})
