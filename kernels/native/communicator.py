"""Ranks on one machine, which sum and exchange through memory that they share; the C++ is in
src/communicator.cpp."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...errors import InvalidRequest, RankLost
from .bindings import DEFAULT_SPIN_US, SPIN_ENV, library_without_threads
from .calls import kernel

MAX_RANKS = 62  # src/communicator.cpp
# Room for what a rank gives at a time: longer vectors go in parts. The steps of decoding fit, and
# two slots a rank stay in a shared cache.
SLOT_BYTES = 1 << 20
_KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}


class SharedMemory:
    """Memory without a name, which a process hands to its children by descriptor; zeros at first.
    Owns the mapping until `close`, and the descriptor if it has made it."""

    def __init__(self, num_ranks: int, descriptor: int | None = None) -> None:
        """descriptor: inherited from the process that made it; None: makes it.

        Raises InvalidRequest for more ranks than there is room for.
        """
        if not 1 <= num_ranks <= MAX_RANKS:
            allowed = f"an integer in [1, {MAX_RANKS}] on one machine"
            raise InvalidRequest.of("tp_size", num_ranks, allowed)
        self.num_bytes: int = library_without_threads().stemma_communicator_bytes(
            num_ranks, SLOT_BYTES
        )
        self._is_maker = descriptor is None
        if descriptor is None:
            descriptor = anonymous_file()
            os.ftruncate(descriptor, self.num_bytes)
        self.descriptor = descriptor
        self.map = mmap.mmap(descriptor, self.num_bytes)

    def close(self) -> None:
        """Give the memory back; whoever made the descriptor closes it."""
        self.map.close()
        if self._is_maker:
            os.close(self.descriptor)


class SharedMemoryCommunicator:
    """See `ops.Communicator`. Its all_reduce can be part of a recording."""

    def __init__(self, memory: SharedMemory, rank: int, num_ranks: int) -> None:
        """Owns the memory from now on. Raises BuildError where there is no compiled library."""
        self.rank, self.num_ranks = rank, num_ranks
        self._memory = memory
        self._library = library_without_threads()
        self._bytes = np.frombuffer(memory.map, dtype=np.uint8)
        spin_us = int(os.environ.get(SPIN_ENV, DEFAULT_SPIN_US))
        self._handle: int = self._library.stemma_communicator(
            self._bytes.ctypes.data, rank, num_ranks, SLOT_BYTES, spin_us
        )
        self._all_reduce = kernel("stemma_all_reduce")

    def all_reduce(self, x: Tensor) -> None:
        """See `ops.Communicator`."""
        kind = _KINDS.get(x.dtype)
        if kind is None:  # float16, which nothing computes in here
            wide = x.float()
            self.all_reduce(wide)
            x.copy_(wide)
            return
        assert x.is_contiguous()
        self._all_reduce(self._handle, x.data_ptr(), x.numel(), kind)

    def all_gather(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """See `ops.Communicator`."""
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        gathered = np.empty((self.num_ranks, flat.size), dtype=np.uint8)
        for first in range(0, flat.size, SLOT_BYTES):
            part = np.ascontiguousarray(flat[first : first + SLOT_BYTES])
            together = np.empty((self.num_ranks, part.size), dtype=np.uint8)
            self._library.stemma_all_gather(
                self._handle, part.ctypes.data, part.size, together.ctypes.data
            )
            gathered[:, first : first + part.size] = together
        self.check()
        return gathered.view(data.dtype).reshape(self.num_ranks, *data.shape)

    def all_to_all(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `ops.Communicator`."""
        sizes = self.all_gather(np.array([len(part) for part in parts], dtype=np.int64))
        data = torch.cat(list(parts))
        own = sizes[:, self.rank].tolist()
        received = data.new_empty(sum(own))
        self._library.stemma_all_to_all(
            self._handle, data.data_ptr(), sizes.ctypes.data, received.data_ptr()
        )
        self.check()
        return torch.split(received, own)

    def gather_columns(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """See `ops.Communicator`."""
        padded = pad(x, (0, max(sizes) - x.shape[1]))
        gathered = torch.from_numpy(self.all_gather(padded.view(torch.uint8).numpy()))
        parts = zip(gathered.view(x.dtype), sizes, strict=True)
        return torch.cat([part[:, :size] for part, size in parts], dim=1)

    def abort(self) -> None:
        """See `ops.Communicator`."""
        if self._handle:
            self._library.stemma_communicator_abort(self._handle)

    def check(self) -> None:
        """See `ops.Communicator`."""
        if not self._handle or self._library.stemma_communicator_is_aborted(self._handle):
            raise RankLost("a rank of the model has ended: the engine cannot go on without it")

    def close(self) -> None:
        """See `ops.Communicator`."""
        handle, self._handle = self._handle, 0
        self._library.stemma_communicator_free(handle)
        del self._bytes
        self._memory.close()


def anonymous_file() -> int:
    """A descriptor of memory without a name, to be handed to children."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stemma-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
