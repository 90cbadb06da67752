"""Copies between a block's bytes and its slots in the device's pool, bit for bit.

A block is scattered in the pool (any 256 slots of each layer) and contiguous outside of it: part
after part (kv_layout.py), each [layers, num_vectors, 256, vector_bytes]. Consecutive slots are
copied as a run; many runs are copied by index. Uses numpy's copies, for the reason given in
transfer.py. docs/how-it-works/tiers.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .disk.block_file import Payload
from .disk.block_key import BLOCK_TOKENS

Bytes = npt.NDArray[np.uint8]  # a part of a layer: [num_vectors, num_slots, vector_bytes]
Slots = npt.NDArray[np.int64]

# Measured (AMD EPYC, 12 layers): a run costs 1 us a layer, an index up to 0.7 us a slot and layer.
_MAX_RUNS = 32


def slots_of(pages: Sequence[int], page_size: int) -> Slots:
    """[len(pages) * page_size]: the slots of pages, in order."""
    first = np.array(pages, dtype=np.int64) * page_size
    return (first[:, None] + np.arange(page_size)).ravel()


def gather_block(memory: Sequence[Bytes], slots: Slots) -> Payload:
    """A copy of the bytes of the block in 256 slots; `memory` by part, then layer. Of other numbers
    of slots likewise."""
    payload = np.empty(sum(_num_bytes(pool, len(slots)) for pool in memory), dtype=np.uint8)
    runs = _runs(slots)
    for pool, block in _pieces(memory, payload, len(slots)):
        if runs is None:
            block[:] = pool[:, slots]
        else:
            for start, end in runs:
                first = slots[start]
                block[:, start:end] = pool[:, first : first + end - start]
    return payload


def scatter_block(
    memory: Sequence[Bytes],
    slots: Slots,
    payload: Payload,
    first_token: int = 0,
    num_tokens: int = BLOCK_TOKENS,
) -> None:
    """Write the tokens from `first_token` on, of a block of so many, to the same number of distinct
    slots."""
    expected = sum(_num_bytes(pool, num_tokens) for pool in memory)
    assert payload.size == expected, f"{payload.size} bytes for a block of {expected}"
    runs = _runs(slots)
    for pool, block in _pieces(memory, payload, num_tokens):
        tokens = block[:, first_token : first_token + len(slots)]
        if runs is None:
            pool[:, slots] = tokens
        else:
            for start, end in runs:
                first = slots[start]
                pool[:, first : first + end - start] = tokens[:, start:end]


def _pieces(
    memory: Sequence[Bytes], payload: Payload, num_tokens: int
) -> Iterator[tuple[Bytes, Bytes]]:
    """Each tensor of the pool with its place, [num_vectors, num_tokens, vector_bytes]."""
    start = 0
    for pool in memory:
        num_vectors, _, vector_bytes = pool.shape
        end = start + _num_bytes(pool, num_tokens)
        yield pool, payload[start:end].reshape(num_vectors, num_tokens, vector_bytes)
        start = end


def _num_bytes(pool: Bytes, num_tokens: int) -> int:
    size: int = pool.shape[0] * num_tokens * pool.shape[2]
    return size


def _runs(slots: Slots) -> list[tuple[int, int]] | None:
    """The index ranges of consecutive slots; None where there are too many to copy one by one."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    if len(breaks) >= _MAX_RUNS:
        return None
    if not len(slots):
        return []
    return list(pairwise([0, *breaks.tolist(), len(slots)]))
