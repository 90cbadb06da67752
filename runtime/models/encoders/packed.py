"""A batch of texts packed end to end: what attention and pooling need to tell them apart.

Texts of one length stand side by side, so that attention takes them as one [texts, length] block:
nothing is padded, and no text sees another.

    tokens   | a a | b b | c c c c c | d d d d d d d d |
    blocks   |  2 texts  |  1 text   |     1 text      |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Texts of one length: tokens [start, start + num_texts * length)."""

    start: int
    num_texts: int
    length: int

    @property
    def end(self) -> int:
        """Where the next block begins."""
        return self.start + self.num_texts * self.length


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """T tokens of N texts, shortest texts first."""

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64: rows of the table of positions, or places in the text
    token_types: Tensor  # [T] int64
    starts: tuple[int, ...]  # [N] of each text
    lengths: tuple[int, ...]  # [N]
    blocks: tuple[Block, ...]


def packed(
    texts: Sequence[Sequence[int]],
    num_first: Sequence[int | None],
    padding_id: int | None,
    device: torch.device,
    *,
    is_exact: bool = False,
) -> PackedTexts:
    """`texts`: token ids, in ascending order of their lengths, none empty. `num_first[i]`: how many
    tokens of a pair are its first text's, marks included; None: it is no pair. `padding_id`: of a
    family that counts positions from there, and only tokens that are no padding. `is_exact`: each
    text is a block of its own: how attention divides a block among threads, and so in which order
    it sums, depends on its size."""
    lengths = tuple(map(len, texts))
    starts = (0, *accumulate(lengths))[:-1]
    ids = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    positions = np.concatenate([_positions(text, padding_id) for text in texts])
    types = np.concatenate([_types(n, first) for n, first in zip(lengths, num_first, strict=True)])
    return PackedTexts(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(types).to(device),
        starts,
        lengths,
        _blocks(lengths, is_exact),
    )


def _positions(text: Sequence[int], padding_id: int | None) -> npt.NDArray[np.int64]:
    if padding_id is None:
        return np.arange(len(text), dtype=np.int64)
    is_text = np.asarray(text, dtype=np.int64) != padding_id
    places: npt.NDArray[np.int64] = np.cumsum(is_text, dtype=np.int64)
    return np.where(is_text, places + padding_id, padding_id)


def _types(length: int, num_first: int | None) -> npt.NDArray[np.int64]:
    types = np.zeros(length, dtype=np.int64)
    if num_first is not None:
        types[num_first:] = 1
    return types


def _blocks(lengths: Sequence[int], is_exact: bool) -> tuple[Block, ...]:
    blocks, start = [], 0
    for length, texts in groupby(lengths):
        num_texts = len(list(texts))
        for size in [1] * num_texts if is_exact else [num_texts]:
            blocks.append(Block(start, size, length))
            start = blocks[-1].end
    return tuple(blocks)
