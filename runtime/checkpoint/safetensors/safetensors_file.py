"""One safetensors file, read with plain reads: the header once, a tensor's bytes on request.

Not with mmap: pages of a mapped file count as memory of this process until they are dropped, and
here data is read straight into its final place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ModelLoadError
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

    def read_into(self, name: str, target: Tensor) -> None:
        """Read into a contiguous tensor of the same shape, in its dtype and on its device."""
        place = self._places[name]
        assert target.is_contiguous() and tuple(target.shape) == place.shape
        flat, dtype = target.view(-1), torch_dtype(place.dtype)
        if target.dtype is dtype and target.device.type == "cpu":
            self._fill(flat, place.start)
            return
        size = dtype.itemsize
        buffer = torch.empty(min(len(flat), _CHUNK_BYTES // size), dtype=dtype)
        for begin in range(0, len(flat), max(1, len(buffer))):
            part = flat[begin : begin + len(buffer)]
            stored = buffer[: len(part)]
            self._fill(stored, place.start + begin * size)
            part.copy_(stored)

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


def torch_dtype(name: str) -> torch.dtype:
    """name: in the format's spelling, a key of DTYPES."""
    found: torch.dtype = getattr(torch, DTYPES[name][0])
    return found
