"""A step's integers on their way to the device: one pinned buffer, one copy.

    |sampling...|token_ids..|sources..|positions..|slots..|attention...|masks......|
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
    """A step's arrays on the device, valid until the next step's are queued."""

    fields: Mapping[str, tuple[Tensor, Field]]  # each with the buffer that it lies in

    def __getitem__(self, name: str) -> Tensor:
        buffer, field = self.fields[name]
        return field.view(buffer)

    def group(self, prefix: str) -> dict[str, Tensor]:
        """Those whose names begin with it, by the rest of their names."""
        names = [name for name in self.fields if name.startswith(prefix)]
        return {name[len(prefix) :]: self[name] for name in names}


class Staging:
    """Owns the pinned buffers, which grow to the largest step so far, and the device's one buffer.

    The device's stays where it is, so that a graph which has read a step's arrays there finds
    another step's at the same places.
    """

    def __init__(
        self, accelerator: Accelerator, num_bytes: int, num_buffers: int = NUM_BUFFERS
    ) -> None:
        """num_bytes: of the device's buffer."""
        self._accelerator = accelerator
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=accelerator.device)
        self._buffers = [_Buffer(accelerator.pinned(num_bytes)) for _ in range(num_buffers)]
        self._next = 0

    def fits(self, arrays: Mapping[str, Array]) -> bool:
        """Whether they lie in the device's own buffer when staged first."""
        return num_bytes_of(fields_of(arrays).values()) <= len(self._device)

    def stage(self, arrays: Mapping[str, Array]) -> Staged:
        """Queue the copy of the arrays to the device. Waits only where so many steps are pending
        that every buffer's copy is."""
        fields = fields_of(arrays)
        num_bytes = num_bytes_of(fields.values())
        host = self._write(arrays, fields, num_bytes)
        # What begins within the device's buffer lies there, the rest in memory of its own.
        kept = {name: field for name, field in fields.items() if field.end <= len(self._device)}
        end = num_bytes_of(kept.values())
        self._accelerator.copy(self._device[:end], host[:end])
        beyond = self._device
        if end < num_bytes:
            beyond = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.device)
            self._accelerator.copy(beyond[end:], host[end:num_bytes])
        self._buffers[self._next - 1].copied = self._accelerator.event()
        return Staged(
            {
                name: (self._device if name in kept else beyond, field)
                for name, field in fields.items()
            }
        )

    def _write(
        self, arrays: Mapping[str, Array], fields: Mapping[str, Field], num_bytes: int
    ) -> Tensor:
        """Fill the next pinned buffer."""
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
        return buffer.host


def fields_of(arrays: Mapping[str, Array]) -> dict[str, Field]:
    """Where each array lies, one after the other."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, array in arrays.items():
        field = Field(offset, _TORCH_DTYPES[array.dtype], array.shape)
        fields[name] = field
        offset = _aligned(field.end)
    return fields


def num_bytes_of(fields: Iterable[Field]) -> int:
    """How long a buffer of these is."""
    return max((field.end for field in fields), default=0)


@dataclass(slots=True)
class _Buffer:
    host: Tensor  # [any] uint8, pinned
    copied: Event | None = None  # after its last copy to the device


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
