"""Copies KV between the tiers, bit by bit, as plans list it.

On a CPU both pools are ordinary memory and copies use numpy: one memcpy for each layer, vector of
its KV and contiguous run of slots, in the calling thread. (torch hands copies of this size to its
thread pool, whose barriers cost milliseconds on a machine that has other work.) Pages come in runs,
since the free lists keep them together; a run of one token costs about as much as an indexed gather
of one. docs/how-it-works/tiers.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from .block_copy import Bytes, gather_block, scatter_block, slots_of
from .copies import BlockRestore, BlockSave, PageFork, TierCopy, Transfer
from .device_pool import DeviceKVPool
from .disk.block_file import Payload
from .host_pool import HostKVPool
from .whole_kv import WholeKV


class KVTransfer:
    """Executes the copies of one device's plans, in their order."""

    def __init__(
        self,
        device_pool: DeviceKVPool,
        host_pool: HostKVPool | None,
        whole: WholeKV | None = None,
    ) -> None:
        """whole: where other processes have other parts of the KV, for blocks are of all."""
        self._whole = whole
        self._page_size = device_pool.page_size
        self._device = _memory_of(device_pool)
        self._host = None if host_pool is None else _memory_of(host_pool)

    def run(self, copies: Iterable[TierCopy]) -> tuple[Payload, ...]:
        """Make the copies; they are done when this returns. Returns the payloads of the
        BlockSaves, in order."""
        payloads = []
        for copy in copies:
            if isinstance(copy, Transfer):
                self._transfer(copy)
            elif isinstance(copy, PageFork):
                self._fork(copy)
            elif isinstance(copy, BlockSave):
                payloads.append(self._save(copy))
            else:
                self._restore(copy)
        return tuple(payloads)

    def _transfer(self, transfer: Transfer) -> None:
        assert self._host is not None, "a plan has transfers, but there is no host pool"
        for first, to, length in self._runs(transfer):
            here, there = slice(first, first + length), slice(to, to + length)
            for device, host in zip(self._device, self._host):
                if transfer.kind == "store":
                    host[:, there] = device[:, here]
                else:
                    device[:, here] = host[:, there]

    def _fork(self, fork: PageFork) -> None:
        sources = slots_of(fork.sources, self._page_size)
        targets = slots_of(fork.targets, self._page_size)
        for device in self._device:
            device[:, targets] = device[:, sources]

    def _save(self, save: BlockSave) -> Payload:
        slots = slots_of(save.pages, self._page_size)
        if self._whole is not None:
            return self._whole.save(self._device, slots)
        return gather_block(self._device, slots)

    def _restore(self, restore: BlockRestore) -> None:
        slots = slots_of(restore.pages, self._page_size)
        if self._whole is not None:
            self._whole.restore(self._device, slots, restore.payload, restore.first_token)
            return
        scatter_block(self._device, slots, restore.payload, restore.first_token)

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


def _memory_of(pool: DeviceKVPool | HostKVPool) -> list[Bytes]:
    """The memory of each part and layer; not a copy."""
    return [tensor.numpy() for part in pool.parts for tensor in part]
