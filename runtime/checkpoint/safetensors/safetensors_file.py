"""One safetensors file, read with plain reads: the header once, a tensor's bytes on request.

Not with mmap: pages of a mapped file count as memory of this process until they are dropped, and
here data is read straight into its final place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ..parts import Range, Rows
from .safetensors_header import DTYPES, open_header
from .stacked_experts import can_unstack, unstacked

_CHUNK_BYTES = 1 << 23  # converted at a time


class SafetensorsFile:
    """Owns an open file until `close`; the caller owns returned tensors. Experts that are stacked
    in one tensor are tensors of their own here."""

    def __init__(self, path: Path, *, unstacks: bool = True) -> None:
        """unstacks: False: it is a shard of a checkpoint whose stacks are to be left as they are.

        Raises ModelLoadError if it is not a safetensors file.
        """
        self.path = path
        self._descriptor, self._places = open_header(path)
        unstacks = unstacks and can_unstack(self._places)
        stacks = unstacked(self._places) if unstacks else {}
        self._parts = {name: tuple(parts) for name, parts in stacks.items()}
        for name, parts in stacks.items():
            del self._places[name]
            self._places |= parts

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def names_for(self, stored: str) -> Iterable[str]:
        """The names of what is stored under a name: itself, or the parts of a stack."""
        return self._parts.get(stored, (stored,))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self._places[name].dtype)

    def num_bytes(self, name: str) -> int:
        return self._places[name].num_bytes

    def read(self, name: str) -> Tensor:
        """The tensor as stored, a new one on the CPU."""
        place = self._places[name]
        tensor = torch.empty(place.shape, dtype=torch_dtype(place.dtype))
        self._fill(tensor.view(-1), place.start)
        return tensor

    def read_into(
        self, name: str, target: Tensor, rows: Rows | None = None, columns: Range | None = None
    ) -> None:
        """Read into a contiguous tensor of the same shape, in its dtype and on its device; or into
        one of these rows alone, and these columns of a matrix. Nothing else is read."""
        place = self._places[name]
        pieces = _pieces(place.shape, rows, columns)
        flat, dtype = target.view(-1), torch_dtype(place.dtype)
        assert target.is_contiguous() and len(flat) == sum(count for _, count in pieces)
        size, done = dtype.itemsize, 0
        is_direct = target.dtype is dtype and target.device.type == "cpu"
        for chunk in [pieces] if is_direct else _chunked(pieces, _CHUNK_BYTES // size):
            count = sum(count for _, count in chunk)
            part = flat[done : done + count]
            stored = part if is_direct else torch.empty(count, dtype=dtype)
            at = 0
            for first, length in chunk:
                self._fill(stored[at : at + length], place.start + first * size)
                at += length
            if not is_direct:
                part.copy_(stored)
            done += count

    def close(self) -> None:
        os.close(self._descriptor)

    def _fill(self, flat: Tensor, start: int) -> None:
        """Fill flat [N] on the CPU with the bytes from `start` on."""
        if not len(flat):
            return
        room = flat.view(torch.uint8).numpy().data
        while room:
            count = os.preadv(self._descriptor, [room[: 1 << 30]], start)
            if count == 0:
                raise ModelLoadError(f"{self.path} has become shorter while it was read")
            room, start = room[count:], start + count


def _pieces(
    shape: Sequence[int], rows: Rows | None, columns: Range | None
) -> list[tuple[int, int]]:
    """The runs of consecutive numbers that make up this part of a tensor: (first, how many)."""
    if rows is None and columns is None:
        return [(0, prod(shape))]
    size = prod(shape[1:])
    rows = [(0, shape[0])] if rows is None else rows
    if columns is None:
        return [(first * size, (end - first) * size) for first, end in rows]
    begin, length = columns[0], columns[1] - columns[0]
    return [(row * size + begin, length) for first, end in rows for row in range(first, end)]


def _chunked(pieces: Iterable[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """The same runs, cut where they are longer, as many at a time as have `most` numbers."""
    chunk: list[tuple[int, int]] = []
    room = most
    for first, count in pieces:
        while count:
            taken = min(count, room)
            chunk.append((first, taken))
            first, count, room = first + taken, count - taken, room - taken
            if not room:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def torch_dtype(name: str) -> torch.dtype:
    """name: in the format's spelling, a key of DTYPES."""
    found: torch.dtype = getattr(torch, DTYPES[name][0])
    return found
