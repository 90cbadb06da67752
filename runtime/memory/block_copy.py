"""Copies between a block's bytes and its slots in the device's pool, bit for bit.

A block lies scattered in the pool (any 256 slots of each layer) and in one piece outside of it:
[num_layers, 2, num_kv_heads, 256, head_dim], as `KVLayout.block_shape` says. Slots that follow each
other are copied as a run; where there are many runs, by index. numpy's copies, for the reason that
transfer.py gives. docs/tiers.md has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .block_file import Payload
from .block_key import BLOCK_TOKENS

Bytes = npt.NDArray[np.uint8]  # a layer: [2, num_kv_heads, num_slots, head_dim * itemsize]
Slots = npt.NDArray[np.int64]

# Measured (AMD EPYC, 12 layers): a run costs 1 us a layer, an index up to 0.7 us a slot and layer.
_MAX_RUNS = 32


def slots_of(pages: Sequence[int], page_size: int) -> Slots:
    """[len(pages) * page_size]: the slots of pages, in their order."""
    first = np.array(pages, dtype=np.int64) * page_size
    return (first[:, None] + np.arange(page_size)).ravel()


def gather_block(layers: Sequence[Bytes], slots: Slots) -> Payload:
    """The bytes of the block in 256 slots, a copy."""
    _, num_heads, _, width = layers[0].shape
    block = np.empty((len(layers), 2, num_heads, BLOCK_TOKENS, width), dtype=np.uint8)
    runs = _runs(slots)
    for layer, target in zip(layers, block, strict=True):
        if runs is None:
            target[:] = layer[:, :, slots]
        else:
            for start, end in runs:
                first = slots[start]
                target[:, :, start:end] = layer[:, :, first : first + end - start]
    return block.reshape(-1)


def scatter_block(
    layers: Sequence[Bytes], slots: Slots, payload: Payload, first_token: int = 0
) -> None:
    """Write the bytes of a block's tokens from `first_token` on to as many slots, all distinct."""
    _, num_heads, _, width = layers[0].shape
    shape = (len(layers), 2, num_heads, BLOCK_TOKENS, width)
    assert payload.size == np.prod(shape), f"{payload.size} bytes for a block of {np.prod(shape)}"
    tokens = payload.reshape(shape)[:, :, :, first_token : first_token + len(slots)]
    runs = _runs(slots)
    for layer, source in zip(layers, tokens, strict=True):
        if runs is None:
            layer[:, :, slots] = source
        else:
            for start, end in runs:
                first = slots[start]
                layer[:, :, first : first + end - start] = source[:, :, start:end]


def _runs(slots: Slots) -> list[tuple[int, int]] | None:
    """The index ranges over which slots follow each other; None for more than pay."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if len(breaks) >= _MAX_RUNS:
        return None
    return list(pairwise([0, *breaks.tolist(), len(slots)]))
