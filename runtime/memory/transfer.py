"""Copies KV between the tiers, bit by bit, as plans say.

On a CPU both pools are ordinary memory and a copy is numpy's: one memcpy a layer, head and
contiguous run of slots, in the calling thread. (torch hands copies of this size to its thread pool,
whose barriers cost milliseconds on a machine that has other work.) Pages come in runs, since the
free lists keep them together; a run of one token costs about as much as an indexed gather of one.
docs/tiers.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..step import Transfer
from .device_pool import DeviceKVPool
from .host_pool import HostKVPool

Bytes = npt.NDArray[np.uint8]  # [2, num_kv_heads, num_slots, head_dim * itemsize]


class KVTransfer:
    """Carries out the transfers of one device's plans, in their order."""

    def __init__(self, device_pool: DeviceKVPool, host_pool: HostKVPool) -> None:
        self._page_size = device_pool.page_size
        self._pairs = [
            (bytes_of(device), bytes_of(host))
            for device, host in zip(device_pool.layers, host_pool.layers, strict=True)
        ]

    def run(self, transfers: Iterable[Transfer]) -> None:
        """Make the copies; they are done when this returns."""
        for transfer in transfers:
            is_store = transfer.kind == "store"
            for first, to, length in self._runs(transfer):
                here, there = slice(first, first + length), slice(to, to + length)
                for device, host in self._pairs:
                    if is_store:
                        host[:, :, there] = device[:, :, here]
                    else:
                        device[:, :, here] = host[:, :, there]

    def _runs(self, transfer: Transfer) -> Iterator[tuple[int, int, int]]:
        """(first device slot, first host slot, slots) of each run that is contiguous on both."""
        for start, end in contiguous_runs(transfer.device_pages, transfer.host_pages):
            yield (
                transfer.device_pages[start] * self._page_size,
                transfer.host_pages[start] * self._page_size,
                (end - start) * self._page_size,
            )


def contiguous_runs(*pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """The index ranges over which each of the sequences counts up by one."""
    columns = np.array([np.fromiter(column, dtype=np.int64) for column in pages])
    if not columns.size:
        return
    breaks = np.flatnonzero((np.diff(columns, axis=1) != 1).any(axis=0)) + 1
    edges = [0, *breaks.tolist(), columns.shape[1]]
    yield from pairwise(edges)


def bytes_of(layer: Tensor) -> Bytes:
    """A CPU tensor's own memory, as bytes."""
    return layer.view(torch.uint8).numpy()
