"""Ranks that are threads of a test: they exchange by a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stemma.native_library import BuildError

T = TypeVar("T")


class ThreadCommunicator:
    """See `ops.Communicator`; all ranks of a group share `parts` and `barrier`."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.num_ranks = rank, len(parts)
        self._parts, self._barrier = parts, barrier
        self.bytes_given = 0

    def all_gather(self, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self._parts[self.rank] = np.array(data)
        self.bytes_given += data.nbytes
        self._barrier.wait()
        gathered = np.stack(self._parts)
        self._barrier.wait()
        return gathered

    def all_to_all(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        self._parts[self.rank] = [part.clone() for part in parts]
        self._barrier.wait()
        received: list[Tensor] = [given[self.rank] for given in self._parts]
        self._barrier.wait()
        return received

    def all_reduce(self, x: Tensor) -> None:
        parts = self.all_gather(x.numpy())
        total = torch.from_numpy(parts[0].copy())
        for part in parts[1:]:
            total += torch.from_numpy(part)
        x.copy_(total)

    def gather_columns(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def abort(self) -> None:
        self._barrier.abort()

    def check(self) -> None: ...

    def close(self) -> None: ...


def without_library(num_ranks: int) -> None:
    """In place of `meeting.SharedMemory`: ranks meet through torch.distributed."""
    raise BuildError("no compiler")


def on_ranks(num_ranks: int, run: Callable[[ThreadCommunicator], T]) -> list[T]:
    """What `run` returns on each rank."""
    return on_grid(num_ranks, 1, lambda row, _: run(row))


def on_grid(
    num_parts: int, num_shares: int, run: Callable[[ThreadCommunicator, ThreadCommunicator], T]
) -> list[T]:
    """What `run` returns on each of the ranks, given those in its row, between which layers are
    divided, and those in its column, between which tokens are."""
    rows = [_group(num_parts) for _ in range(num_shares)]
    columns = [_group(num_shares) for _ in range(num_parts)]

    def guarded(number: int) -> T:
        row, column = divmod(number, num_parts)
        try:
            return run(
                ThreadCommunicator(column, *rows[row]), ThreadCommunicator(row, *columns[column])
            )
        except BaseException:
            for _, barrier in (*rows, *columns):
                barrier.abort()
            raise

    num_ranks = num_parts * num_shares
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(guarded, range(num_ranks)))


def _group(size: int) -> tuple[list[Any], threading.Barrier]:
    return [None] * size, threading.Barrier(size)
