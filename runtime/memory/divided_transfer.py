"""Copies between tiers where each rank has some pages of either (`kernels.context_share`).

A page that is another rank's in host memory than on the device crosses between them: of random
pages so many as all but one in `num_ranks`. Every rank knows all copies, and so what it gets.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.context_share import PageShare
from .block_copy import Bytes
from .copies import PageFork, Transfer
from .device_pool import DeviceKVPool
from .host_pool import HostKVPool
from .transfer import KVTransfer
from .whole_kv import WholeKV

AllGather = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
Ids = npt.NDArray[np.int32]


class DividedKVTransfer(KVTransfer):
    """Executes the copies of one rank's plans, in their order, as all ranks do."""

    def __init__(
        self,
        device_pool: DeviceKVPool,
        host_pool: HostKVPool | None,
        pages: PageShare,
        all_gather: AllGather,
        whole: WholeKV | None = None,
    ) -> None:
        """all_gather: see `ops.Communicator`."""
        super().__init__(device_pool, host_pool, whole)
        self._pages = pages
        self._all_gather = all_gather

    def _transfer(self, transfer: Transfer) -> None:
        kind, device, host = transfer.kind, _ids(transfer.device_pages), _ids(transfer.host_pages)
        is_crossing = self._is_crossing(device, host)
        super()._transfer(Transfer(kind, *self._local(device, host, is_crossing)))
        if is_crossing.any():
            assert self._host is not None, "a plan has transfers, but there is no host pool"
            device, host = device[is_crossing], host[is_crossing]
            if kind == "store":
                self._cross(self._device, device, self._host, host)
            else:
                self._cross(self._host, host, self._device, device)

    def _fork(self, fork: PageFork) -> None:
        sources, targets = _ids(fork.sources), _ids(fork.targets)
        is_crossing = self._is_crossing(sources, targets)
        super()._fork(PageFork(*self._local(sources, targets, is_crossing)))
        if is_crossing.any():
            self._cross(self._device, sources[is_crossing], self._device, targets[is_crossing])

    def _is_crossing(self, one: Ids, other: Ids) -> npt.NDArray[np.bool_]:
        """Which pairs of pages are two ranks'."""
        crossing: npt.NDArray[np.bool_] = (
            one % self._pages.num_ranks != other % self._pages.num_ranks
        )
        return crossing

    def _local(
        self, one: Ids, other: Ids, is_crossing: npt.NDArray[np.bool_]
    ) -> tuple[array[int], array[int]]:
        """This rank's own pairs, as it numbers its pages."""
        own = ~is_crossing & self._pages.is_own(one)
        here, there = (array("i", self._pages.local(ids[own]).tobytes()) for ids in (one, other))
        return here, there

    def _cross(
        self, source: Sequence[Bytes], sent: Ids, target: Sequence[Bytes], received: Ids
    ) -> None:
        """Pages `sent` of all ranks' source, to `received` of all ranks' target."""
        senders = sent % self._pages.num_ranks
        most = int(np.bincount(senders).max())
        given = self._views(source)
        own = self._pages.local(sent[self._pages.is_own(sent)])
        packed = np.zeros((most, sum(view[:, 0].size for view in given)), dtype=np.uint8)
        first = 0
        for view in given:
            behind = first + view[:, 0].size
            by_page = view[:, own].swapaxes(0, 1)
            packed[: len(own), first:behind] = by_page.reshape(len(own), behind - first)
            first = behind
        gathered = self._all_gather(packed)
        for rank, of_rank in enumerate(gathered):
            pages = received[senders == rank]
            is_own = self._pages.is_own(pages)
            self._unpack(target, self._pages.local(pages[is_own]), of_rank[: len(pages)][is_own])

    def _unpack(self, target: Sequence[Bytes], pages: Ids, packed: npt.NDArray[np.uint8]) -> None:
        first = 0
        for view in self._views(target):
            behind = first + view[:, 0].size
            values = packed[:, first:behind].reshape(len(pages), view.shape[0], view.shape[2])
            view[:, pages] = values.swapaxes(0, 1)
            first = behind

    def _views(self, memory: Sequence[Bytes]) -> list[Bytes]:
        """By pages: [num_vectors, num_pages, bytes of a vector's page]."""
        return [pool.reshape(len(pool), -1, self._page_size * pool.shape[2]) for pool in memory]


def _ids(pages: Sequence[int]) -> Ids:
    return np.array(pages, dtype=np.int32)
