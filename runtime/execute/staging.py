"""A step's integers on their way to the device: one pinned buffer, one copy.

    |token_ids..|sources..|positions..|slots..|attention...|sampling...|masks......|
    0           16-byte boundaries

The host fills a buffer while the previous buffer's copy may still wait for the device; a buffer is
written again only after its own last copy is done. An array's offset follows from the names, shapes
and dtypes before it, so that steps with equal first arrays have the same layout for these.
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
# As many as there may be pending steps, without stages.
NUM_BUFFERS = 2
# Bytes; the widest load of a GPU thread.
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
    """The place of one array in a buffer."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first byte after it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """The array in a buffer [any] uint8, as a tensor that shares its memory."""
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
        """Queue the copy of the arrays to the device. Waits only if the copies of all buffers are
        still pending."""
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
    """The arrays' places, one after the other."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, array in arrays.items():
        field = Field(offset, _TORCH_DTYPES[array.dtype], array.shape)
        fields[name] = field
        offset = aligned(field.end)
    return fields


def num_bytes_of(fields: Iterable[Field]) -> int:
    """The length of a buffer with these fields."""
    return max((field.end for field in fields), default=0)


def aligned(num_bytes: int) -> int:
    """Rounded up to the next boundary."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Buffer:
    host: Tensor  # [any] uint8, pinned
    copied: Event | None = None  # after its last copy to the device


class ReadBack:
    """Owns the pinned memory of one step's outputs."""

    def __init__(self, accelerator: Accelerator, answers: Mapping[str, Tensor]) -> None:
        """Queue the copies to the host."""
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
        """Wait for the copies. The arrays share this object's memory."""
        self.done.wait()
        return {name: field.view(self._host).numpy() for name, field in self._fields.items()}
