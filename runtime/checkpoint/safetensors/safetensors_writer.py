"""Writes a checkpoint's safetensors, tensor by tensor: only one is in memory at a time.

What there will be is said first, since a file begins with the places of all its tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from .checkpoint_files import INDEX_FILE, SINGLE_FILE
from .safetensors_file import torch_dtype
from .safetensors_header import DTYPES

SHARD_BYTES = 5_000_000_000  # as other tools cut
_NAMES = {torch_dtype(name): name for name in DTYPES}

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class SafetensorsWriter:
    """Tensors are to be written in the order in which they were announced."""

    def __init__(self, folder: Path, shapes: Shapes, shard_bytes: int = SHARD_BYTES) -> None:
        self._shards = _shards(shapes, shard_bytes)
        self._folder = folder
        self._shapes = shapes
        self._coming = [
            (number, name) for number, shard in enumerate(self._shards) for name in shard
        ]
        self._coming.reverse()
        self._number = -1
        self._file: BinaryIO | None = None
        self.total_bytes = sum(_num_bytes(shape, dtype) for shape, dtype in shapes.values())

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Those that come next."""
        for name, tensor in tensors.items():
            number, expected = self._coming.pop()
            assert (name, tuple(tensor.shape), tensor.dtype) == (expected, *self._shapes[name])
            if number != self._number:
                self._next_file(number)
            assert self._file is not None
            flat = tensor.contiguous().view(-1)
            self._file.write(flat.view(torch.uint8).numpy().data)

    def close(self) -> None:
        """After the last tensor: ends the last file and writes the index of several."""
        assert not self._coming, f"{len(self._coming)} tensors were announced but not written"
        if self._file is not None:
            self._file.close()
        if len(self._shards) == 1:
            return
        places = {
            name: self._file_name(number)
            for number, shard in enumerate(self._shards)
            for name in shard
        }
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _next_file(self, number: int) -> None:
        if self._file is not None:
            self._file.close()
        self._number = number
        self._file = (self._folder / self._file_name(number)).open("wb")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._shards[number]:
            shape, dtype = self._shapes[name]
            start, end = end, end + _num_bytes(shape, dtype)
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
        self._file.write(len(text).to_bytes(8, "little") + text)

    def _file_name(self, number: int) -> str:
        count = len(self._shards)
        return SINGLE_FILE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _shards(shapes: Shapes, shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, (shape, dtype) in shapes.items():
        size = _num_bytes(shape, dtype)
        if size > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize
