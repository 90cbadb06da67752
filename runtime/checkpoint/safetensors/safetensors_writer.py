"""Writes a checkpoint's safetensors: at most one of its files is in memory at a time.

All tensors are announced first, since a file's name includes the number of files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint_files import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 1_000_000_000  # memory of a shard until it is written

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class SafetensorsWriter:
    """Tensors must be written in the order in which they were announced."""

    def __init__(self, folder: Path, shapes: Shapes, shard_bytes: int = SHARD_BYTES) -> None:
        self._shards = _shards(shapes, shard_bytes)
        self._folder = folder
        self._shapes = shapes
        self._number = 0
        self._held: dict[str, Tensor] = {}
        self.total_bytes = sum(_num_bytes(shape, dtype) for shape, dtype in shapes.values())

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the next tensors; they must not change until their file is written."""
        for name, tensor in tensors.items():
            shard = self._shards[self._number]
            expected = shard[len(self._held)]
            assert (name, tuple(tensor.shape), tensor.dtype) == (expected, *self._shapes[name])
            self._held[name] = tensor.contiguous()
            if len(self._held) == len(shard):
                self._save(self._folder / self._file_name(self._number))
                self._number += 1
                self._held = {}

    def close(self) -> None:
        """Call after the last tensor: writes the index if there are several files."""
        num_missing = sum(map(len, self._shards[self._number :])) - len(self._held)
        assert not num_missing, f"{num_missing} tensors were announced but not written"
        if len(self._shards) == 1:
            return
        places = {
            name: self._file_name(number)
            for number, shard in enumerate(self._shards)
            for name in shard
        }
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": places}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _save(self, path: Path) -> None:
        """The library makes files that only their owner may read; this one has the usual mode."""
        path.touch()
        mode = path.stat().st_mode
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(mode)

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
