"""A step's integers on their way to the device: one pinned buffer, one copy.

    |token_ids..|sources..|positions..|slots..|attention...|sampling...|masks......|
    0           16-byte boundaries

The host fills a buffer while the copy of the one before may still be waiting for the device; a
buffer's own last copy must be done before it is written again. Where an array lies follows from the
names, shapes and dtypes before it, so that steps which begin with the same ones lay them out alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .accelerator import Accelerator, Event

Array = npt.NDArray[Any]
# As many as steps may be pending.
NUM_BUFFERS = 2
# Bytes; the widest load of a GPU's thread.
ALIGNMENT = 16
_TORCH_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class Field:
    """Where one array lies in a buffer."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The array in a buffer [any] uint8, as a tensor over the same memory."""
        return buffer[self.offset : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Staged:
    """A step's arrays on the device. They live as long as something refers to them."""

    buffer: Tensor  # [num_bytes] uint8
    fields: Mapping[str, Field]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name].view(self.buffer)


class Staging:
    """Owns the pinned buffers; they grow to the largest step so far."""

    def __init__(self, accelerator: Accelerator, num_buffers: int = NUM_BUFFERS) -> None:
        self._accelerator = accelerator
        self._buffers = [_Buffer(accelerator.pinned(0)) for _ in range(num_buffers)]
        self._next = 0

    def stage(self, arrays: Mapping[str, Array]) -> Staged:
        """Queue the copy of the arrays to the device. Waits only where so many steps are pending
        that every buffer's copy is."""
        fields = fields_of(arrays)
        num_bytes = num_bytes_of(fields.values())
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        if buffer.copied is not None:
            buffer.copied.wait()
        if len(buffer.host) < num_bytes:
            buffer.host = self._accelerator.pinned(2 * num_bytes)
        written = buffer.host.numpy()
        for name, array in arrays.items():
            field = fields[name]
            written[field.offset : field.end].view(array.dtype).reshape(array.shape)[...] = array
        device = torch.empty(num_bytes, dtype=torch.uint8, device=self._accelerator.device)
        self._accelerator.copy(device, buffer.host[:num_bytes])
        buffer.copied = self._accelerator.event()
        return Staged(device, fields)


def fields_of(arrays: Mapping[str, Array]) -> dict[str, Field]:
    """Where each array lies, one after the other."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, array in arrays.items():
        field = Field(offset, _TORCH_DTYPES[array.dtype], array.shape)
        fields[name] = field
        offset = aligned(field.end)
    return fields


def num_bytes_of(fields: Iterable[Field]) -> int:
    """How long a buffer of these is."""
    return max((field.end for field in fields), default=0)


def aligned(num_bytes: int) -> int:
    """Up to the next boundary."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Buffer:
    host: Tensor  # [any] uint8, pinned
    copied: Event | None = None  # after its last copy to the device


class ReadBack:
    """Owns the pinned memory of one step's answers."""

    def __init__(self, accelerator: Accelerator, answers: Mapping[str, Tensor]) -> None:
        """Queue the copies."""
        self._fields: dict[str, Field] = {}
        offset = 0
        for name, tensor in answers.items():
            self._fields[name] = Field(offset, tensor.dtype, tuple(tensor.shape))
            offset = aligned(self._fields[name].end)
        self._host = accelerator.pinned(offset)
        for name, tensor in answers.items():
            accelerator.copy(self._fields[name].view(self._host), tensor)
        self.done = accelerator.event()

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Waits for the copies. The arrays are this object's memory."""
        self.done.wait()
        return {name: field.view(self._host).numpy() for name, field in self._fields.items()}
