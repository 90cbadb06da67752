"""Copies KV between a GPU and the host, bit by bit, as plans list it: queued, not waited for.

    device layers --pack--> staged pages --one copy a run of host pages--> pinned pool
    device layers <-unpack- staged pages <--------------------------------

All work goes to one stream, in plan order, which is all the ordering that copies need. It may be
beside the one on which steps are computed: what plans in flight use is not copied to, and what they
write is not copied from. A step waits until the pool is as its plan says (`pool_is_done`), and not
for the bus that takes what was packed. A kernel packs the pages of all layers in one launch a part,
and a run of host pages is one copy. Payloads for the host (blocks for the disk) are in pinned
memory of their own, and are read together with the step's results. docs/how-it-works/tiers.md gives
the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.ops import MakePageCopy
from .copies import BlockRestore, BlockSave, PageFork, TierCopy, Transfer
from .device_pool import DeviceKVPool
from .disk.block_file import Payload
from .disk.block_key import BLOCK_TOKENS
from .host_pool import PinnedKVPool
from .transfer import contiguous_runs

# Device memory of a staging buffer. A copy of this size takes as long as several tens of launches
# (a guess).
_MAX_STAGED_BYTES = 64 << 20


class Moment(Protocol):
    """A point in the order of queued work."""

    def wait(self) -> None:
        """Block the host until all work queued before is done."""


class CopyQueue(Protocol):
    """The part of an accelerator that copies need; queued work is done in order."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of pinned host memory; it outlives the copies queued on it."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between pinned memory and the device, of one dtype and shape."""

    def event(self) -> Moment:
        """The point after all work queued so far."""


@dataclass(frozen=True, slots=True)
class AsynchronousCopies:
    """The copies of one plan, which may still be pending."""

    saved: tuple[Tensor, ...]  # each a block's bytes, pinned
    pool_is_done: Moment  # nothing more is read from the device's pool, or written to it
    done: Moment

    def payloads(self) -> tuple[Payload, ...]:
        """The payloads of the plan's BlockSaves, in their order; waits for the copies if there are
        any. A payload owns its memory."""
        if self.saved:
            self.done.wait()
        return tuple(block.numpy() for block in self.saved)


@dataclass(slots=True)
class _LateCopies:
    """A plan's copies of packed pages to the host, made behind all that concerns the pool: in their
    order, and no later than their sources have `_MAX_STAGED_BYTES`."""

    host_pages: set[int] = field(default_factory=set)  # that they write
    _copies: list[Callable[[], None]] = field(default_factory=list)
    _num_bytes: int = 0

    def add(self, copy: Callable[[], None], num_bytes: int) -> None:
        self._copies.append(copy)
        self._num_bytes += num_bytes
        if self._num_bytes >= _MAX_STAGED_BYTES:
            self.make()

    def make(self) -> None:
        """Queue them."""
        for copy in self._copies:
            copy()
        self._copies.clear()
        self.host_pages.clear()
        self._num_bytes = 0


class AsynchronousKVTransfer:
    """Queues the copies of one device's plans, in their order."""

    def __init__(
        self,
        device_pool: DeviceKVPool,
        host_pool: PinnedKVPool | None,
        make_page_copy: MakePageCopy,
        queue: CopyQueue,
    ) -> None:
        self._queue = queue
        self._page_size = device_pool.page_size
        self._host = None if host_pool is None else host_pool.pages
        self._layout = device_pool.layout
        self._late = _LateCopies()
        self._page_bytes = self._page_size * device_pool.layout.bytes_per_token
        self._pages = [make_page_copy(part, self._page_size) for part in device_pool.parts]

    def run(self, copies: Iterable[TierCopy]) -> AsynchronousCopies:
        """Queue the copies; work queued later in the same order sees them done."""
        saved = []
        self._late = _LateCopies()
        for copy in copies:
            if isinstance(copy, Transfer):
                self._transfer(copy)
            elif isinstance(copy, PageFork):
                self._fork(copy)
            elif isinstance(copy, BlockSave):
                saved.append(self._save(copy))
            else:
                self._restore(copy)
        pool_is_done = self._queue.event()
        self._late.make()
        return AsynchronousCopies(tuple(saved), pool_is_done, self._queue.event())

    def _transfer(self, transfer: Transfer) -> None:
        assert self._host is not None, "a plan has transfers, but there is no host pool"
        num_pages = self._max_staged_pages()
        for first in range(0, len(transfer.host_pages), num_pages):
            part = slice(first, first + num_pages)
            self._move(
                transfer.kind == "store",
                transfer.device_pages[part],
                transfer.host_pages[part],
                self._host,
            )

    def _move(
        self, is_store: bool, device_pages: Sequence[int], host_pages: Sequence[int], host: Tensor
    ) -> None:
        if not is_store and not self._late.host_pages.isdisjoint(host_pages):
            self._late.make()  # it reads what they write
        on_device = self._on_device(device_pages)
        staged = self._empty(len(host_pages), self._page_bytes)
        packed = self._packed_pages(staged)
        if is_store:
            self._pack(on_device, packed)
        for start, end in contiguous_runs(host_pages):
            here, there = staged[start:end], host[host_pages[start] :][: end - start]
            if is_store:
                self._late.add(partial(self._queue.copy, there, here), here.nbytes)
            else:
                self._queue.copy(here, there)
        if is_store:
            self._late.host_pages.update(host_pages)
        else:
            self._unpack(on_device, packed)

    def _max_staged_pages(self) -> int:
        return max(1, _MAX_STAGED_BYTES // self._page_bytes)

    def _fork(self, fork: PageFork) -> None:
        num_pages = self._max_staged_pages()
        for first in range(0, len(fork.sources), num_pages):
            part = slice(first, first + num_pages)
            packed = self._packed_pages(self._empty(len(fork.sources[part]), self._page_bytes))
            self._pack(self._on_device(fork.sources[part]), packed)
            self._unpack(self._on_device(fork.targets[part]), packed)

    def _save(self, save: BlockSave) -> Tensor:
        block = self._empty(BLOCK_TOKENS * self._layout.bytes_per_token)
        self._pack(self._on_device(save.pages), self._packed_block(block))
        payload = self._queue.pinned(block.nbytes)
        self._late.add(partial(self._queue.copy, payload, block), block.nbytes)
        return payload

    def _restore(self, restore: BlockRestore) -> None:
        block = self._empty(BLOCK_TOKENS * self._layout.bytes_per_token)
        assert restore.payload.size == block.nbytes, f"{restore.payload.size} bytes for a block"
        first, misfit = divmod(restore.first_token, self._page_size)
        assert not misfit, "a block is restored from the start of a page on"
        self._copy_in(block, restore.payload)
        end = first + len(restore.pages)
        packed = [part[:, :, first:end] for part in self._packed_block(block)]
        self._unpack(self._on_device(restore.pages), packed)

    def _pack(self, pages: Tensor, packed: Sequence[Tensor]) -> None:
        for part, target in zip(self._pages, packed, strict=True):
            part.pack(pages, target)

    def _unpack(self, pages: Tensor, packed: Sequence[Tensor]) -> None:
        for part, source in zip(self._pages, packed, strict=True):
            part.unpack(pages, source)

    def _packed_pages(self, staged: Tensor) -> list[Tensor]:
        """The parts of pages [N, page_bytes], as `ops.PageCopy` takes them."""
        page_size, packed, start = self._page_size, [], 0
        for part in self._layout.parts:
            num_layers = len(self._layout.layers_of(part))
            end = start + num_layers * page_size * part.bytes_per_token
            shape = (len(staged), num_layers, part.num_vectors, page_size, part.vector_bytes)
            packed.append(staged[:, start:end].view(shape).permute(1, 2, 0, 3, 4))
            start = end
        return packed

    def _packed_block(self, block: Tensor) -> list[Tensor]:
        """The parts of a block's payload, as `ops.PageCopy` takes them."""
        num_pages, packed, start = BLOCK_TOKENS // self._page_size, [], 0
        for part in self._layout.parts:
            num_layers = len(self._layout.layers_of(part))
            end = start + num_layers * BLOCK_TOKENS * part.bytes_per_token
            shape = (num_layers, part.num_vectors, num_pages, self._page_size, part.vector_bytes)
            packed.append(block[start:end].view(shape))
            start = end
        return packed

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._queue.device)

    def _on_device(self, pages: Sequence[int]) -> Tensor:
        """[len(pages)] int64"""
        ids = np.array(pages, dtype=np.int64)
        device = torch.empty(len(ids), dtype=torch.int64, device=self._queue.device)
        self._copy_in(device.view(torch.uint8), ids.view(np.uint8))
        return device

    def _copy_in(self, target: Tensor, source: Payload) -> None:
        """Through pinned memory, since a copy from other memory waits for the device."""
        pinned = self._queue.pinned(source.size)
        pinned.numpy()[:] = source
        self._queue.copy(target, pinned)
