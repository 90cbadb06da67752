"""Where a piece of a stream lies in the blocks that a receiver has for it.

A piece is one layer's part of some tokens, [num_vectors, length, vector_bytes]; in a block it is a
slice of [num_vectors, BLOCK_TOKENS, vector_bytes], part after part, layer after layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..disk.block_file import Payload
from ..disk.block_key import BLOCK_TOKENS, BlockLayout


class Place(NamedTuple):
    """Of a piece, in each block."""

    first: int  # byte
    num_vectors: int
    vector_bytes: int


def places_of(layout: BlockLayout) -> list[Place]:
    """Of all pieces, in order."""
    places, first = [], 0
    for part in layout.kv.parts:
        for _ in layout.kv.layers_of(part):
            places.append(Place(first, part.num_vectors, part.vector_bytes))
            first += part.num_vectors * BLOCK_TOKENS * part.vector_bytes
    assert first == layout.block_bytes
    return places


def put_piece(blocks: Sequence[Payload], place: Place, token: int, kv: Payload) -> None:
    """Copy a piece to its place. `token`: its first one, counted from the first block's first;
    `kv`: uint8, [num_vectors, length, vector_bytes]."""
    size = place.num_vectors * BLOCK_TOKENS * place.vector_bytes
    shape = (place.num_vectors, BLOCK_TOKENS, place.vector_bytes)
    for index, low, high in _in_blocks(token, kv.shape[1]):
        block = blocks[index][place.first : place.first + size].reshape(shape)
        at = index * BLOCK_TOKENS
        block[:, low - at : high - at] = kv[:, low - token : high - token]


def spans_of(layout: BlockLayout, place: Place, token: int, length: int) -> npt.NDArray[np.uint64]:
    """The same as copies of bytes, where the blocks lie one behind the other: [num_spans, 3], first
    byte in the piece, first byte in the blocks, number of bytes."""
    vectors = np.arange(place.num_vectors)
    spans = []
    for index, low, high in _in_blocks(token, length):
        source = (vectors * length + low - token) * place.vector_bytes
        in_block = (vectors * BLOCK_TOKENS + low - index * BLOCK_TOKENS) * place.vector_bytes
        target = index * layout.block_bytes + place.first + in_block
        spans.append(np.stack([source, target, 0 * vectors + (high - low) * place.vector_bytes], 1))
    return np.concatenate(spans).astype(np.uint64)


def _in_blocks(token: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Of each block that these tokens are in: its index, the first of them and the end."""
    end = token + length
    for index in range(token // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
        at = index * BLOCK_TOKENS
        yield index, max(token, at), min(end, at + BLOCK_TOKENS)
