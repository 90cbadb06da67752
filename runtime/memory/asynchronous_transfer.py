"""Copies KV between a GPU and the host, bit by bit, as plans list it: queued, not waited for.

    device layers --pack--> staged pages --one copy a run of host pages--> pinned pool
    device layers <-unpack- staged pages <--------------------------------

All work goes to one stream, in plan order, which is all the ordering that copies need. It may be
beside the one on which steps are computed: what plans in flight use is not copied to, and what they
write is not copied from. A step waits until the pool is as its plan says, and not for the bus that
takes what was packed: for all of it (`pool_is_done`), or before each run of layers for these alone
(`layers`), since a plan's copies are made run by run. A kernel packs the pages of a run in one
launch a part, and a run of host pages is one copy. Payloads for the host (blocks for the disk) are
in pinned memory of their own, and are read together with the step's results.
docs/how-it-works/tiers.md gives the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.ops import MakePageCopy, PageCopy
from .copies import BlockRestore, BlockSave, PageFork, TierCopy, Transfer
from .device_pool import DeviceKVPool
from .disk.block_file import Payload
from .disk.block_key import BLOCK_TOKENS
from .host_pool import MAX_RUNS, PinnedKVPool, bytes_per_token
from .kv_layout import KVPart
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


class LayersDone(NamedTuple):
    """The pool's layers from `first_layer` on to those of the next are as the plan says."""

    first_layer: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class AsynchronousCopies:
    """The copies of one plan, which may still be pending."""

    saved: tuple[Tensor, ...]  # each a block's bytes, pinned
    layers: tuple[LayersDone, ...]  # in their order, from layer 0 on; each is behind those before
    done: Moment

    @property
    def pool_is_done(self) -> Moment:
        """Nothing more is read from the device's pool, or written to it."""
        return self.layers[-1].moment

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


class _Run:
    """A run of layers: its pages on the device, and where it lies in what is packed."""

    def __init__(self, pool: DeviceKVPool, layers: range, make_page_copy: MakePageCopy) -> None:
        layout, self._page_size = pool.layout, pool.page_size
        self.first_layer = layers.start
        self.parts: list[tuple[KVPart, int]] = []  # those that it has, and of how many layers
        self._pages: list[PageCopy] = []
        self.in_block: list[slice] = []  # of a block's payload, its bytes of each part
        start = 0
        for part, tensors in zip(layout.parts, pool.parts, strict=True):
            own, layer_bytes = layout.within(part, layers), BLOCK_TOKENS * part.bytes_per_token
            if tensors[own]:
                self.parts.append((part, len(tensors[own])))
                self._pages.append(make_page_copy(tensors[own], self._page_size))
                ends = start + own.start * layer_bytes, start + own.stop * layer_bytes
                self.in_block.append(slice(*ends))
            start += len(tensors) * layer_bytes
        self.page_bytes = self._page_size * bytes_per_token(layout, layers)
        self.block_bytes = BLOCK_TOKENS * bytes_per_token(layout, layers)

    def pack(self, pages: Tensor, packed: Sequence[Tensor]) -> None:
        for copy, target in zip(self._pages, packed, strict=True):
            copy.pack(pages, target)

    def unpack(self, pages: Tensor, packed: Sequence[Tensor]) -> None:
        for copy, source in zip(self._pages, packed, strict=True):
            copy.unpack(pages, source)

    def pages(self, staged: Tensor) -> list[Tensor]:
        """The parts of pages [N, page_bytes], as `ops.PageCopy` takes them."""
        page_size, packed, start = self._page_size, [], 0
        for part, num_layers in self.parts:
            end = start + num_layers * page_size * part.bytes_per_token
            shape = (len(staged), num_layers, part.num_vectors, page_size, part.vector_bytes)
            packed.append(staged[:, start:end].view(shape).permute(1, 2, 0, 3, 4))
            start = end
        return packed

    def block(self, staged: Tensor) -> list[Tensor]:
        """The parts of a block [block_bytes], as `ops.PageCopy` takes them."""
        num_pages, shapes = BLOCK_TOKENS // self._page_size, []
        for part, num_layers in self.parts:
            shapes.append(
                (num_layers, part.num_vectors, num_pages, self._page_size, part.vector_bytes)
            )
        return [
            of_part.view(shape)
            for of_part, shape in zip(self.of_parts(staged), shapes, strict=True)
        ]

    def of_parts(self, staged: Tensor) -> tuple[Tensor, ...]:
        """The bytes of each part of a block [block_bytes]."""
        return torch.split(staged, [each.stop - each.start for each in self.in_block])


_Layerwise = Callable[[int, _Run], None]
"""A copy, queued for a run of layers, whose number is given, too."""


class AsynchronousKVTransfer:
    """Queues the copies of one device's plans, in their order; in each plan all copies of the first
    layers come first."""

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
        self._block_bytes = BLOCK_TOKENS * device_pool.layout.bytes_per_token
        self._late = _LateCopies()
        layout = device_pool.layout
        self._all = _Run(device_pool, range(layout.num_layers), make_page_copy)
        runs = layout.runs(MAX_RUNS) if host_pool is None else host_pool.runs
        self._runs = [_Run(device_pool, run, make_page_copy) for run in runs]

    def run(self, copies: Sequence[TierCopy]) -> AsynchronousCopies:
        """Queue the copies; work queued later in the same order sees them done."""
        self._late, saved = _LateCopies(), list[Tensor]()
        layerwise = [self._layerwise(copy, saved) for copy in copies]
        # Nobody waits long for what stays on the device: fewer launches are worth more.
        is_near = all(isinstance(copy, PageFork | BlockSave) for copy in copies)
        layers = []
        for number, run in enumerate([self._all] if is_near else self._runs):
            for copy in layerwise:
                copy(number, run)
            layers.append(LayersDone(run.first_layer, self._queue.event()))
        self._late.make()
        return AsynchronousCopies(tuple(saved), tuple(layers), self._queue.event())

    def _layerwise(self, copy: TierCopy, saved: list[Tensor]) -> _Layerwise:
        if isinstance(copy, Transfer):
            return self._transfer(copy)
        if isinstance(copy, PageFork):
            return self._fork(copy)
        if isinstance(copy, BlockRestore):
            return self._restore(copy)
        saved.append(self._queue.pinned(self._block_bytes))
        return self._save(copy, saved[-1])

    def _transfer(self, transfer: Transfer) -> _Layerwise:
        assert self._host is not None, "a plan has transfers, but there is no host pool"
        host = self._host
        device_pages = self._on_device(transfer.device_pages)

        def copy(number: int, run: _Run) -> None:
            num_pages = _num_staged_pages(run)
            for first in range(0, len(transfer.host_pages), num_pages):
                part = slice(first, first + num_pages)
                host_pages = transfer.host_pages[part]
                move = self._store if transfer.kind == "store" else self._load
                move(run, device_pages[part], host_pages, host[number])

        return copy

    def _store(
        self, run: _Run, device_pages: Tensor, host_pages: Sequence[int], host: Tensor
    ) -> None:
        staged = self._empty(len(host_pages), run.page_bytes)
        run.pack(device_pages, run.pages(staged))
        for here, there in _runs_of(staged, host, host_pages):
            self._late.add(partial(self._queue.copy, there, here), here.nbytes)
        self._late.host_pages.update(host_pages)

    def _load(
        self, run: _Run, device_pages: Tensor, host_pages: Sequence[int], host: Tensor
    ) -> None:
        if not self._late.host_pages.isdisjoint(host_pages):
            self._late.make()  # it reads what they write
        staged = self._empty(len(host_pages), run.page_bytes)
        for here, there in _runs_of(staged, host, host_pages):
            self._queue.copy(here, there)
        run.unpack(device_pages, run.pages(staged))

    def _fork(self, fork: PageFork) -> _Layerwise:
        sources, targets = self._on_device(fork.sources), self._on_device(fork.targets)

        def copy(number: int, run: _Run) -> None:
            num_pages = _num_staged_pages(run)
            for first in range(0, len(fork.sources), num_pages):
                part = slice(first, first + num_pages)
                packed = run.pages(self._empty(len(sources[part]), run.page_bytes))
                run.pack(sources[part], packed)
                run.unpack(targets[part], packed)

        return copy

    def _save(self, save: BlockSave, payload: Tensor) -> _Layerwise:
        pages = self._on_device(save.pages)

        def copy(number: int, run: _Run) -> None:
            block = self._empty(run.block_bytes)
            run.pack(pages, run.block(block))
            for there, here in zip(run.in_block, run.of_parts(block), strict=True):
                self._late.add(partial(self._queue.copy, payload[there], here), here.nbytes)

        return copy

    def _restore(self, restore: BlockRestore) -> _Layerwise:
        size = restore.payload.size
        assert size == self._block_bytes, f"{size} bytes for a block"
        first, misfit = divmod(restore.first_token, self._page_size)
        assert not misfit, "a block is restored from the start of a page on"
        pages, payload = self._on_device(restore.pages), self._pinned(restore.payload)

        def copy(number: int, run: _Run) -> None:
            block = self._empty(run.block_bytes)
            for there, here in zip(run.in_block, run.of_parts(block), strict=True):
                self._queue.copy(here, payload[there])
            packed = [part[:, :, first : first + len(pages)] for part in run.block(block)]
            run.unpack(pages, packed)

        return copy

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=self._queue.device)

    def _on_device(self, pages: Sequence[int]) -> Tensor:
        """[len(pages)] int64"""
        ids = np.array(pages, dtype=np.int64)
        device = torch.empty(len(ids), dtype=torch.int64, device=self._queue.device)
        self._queue.copy(device.view(torch.uint8), self._pinned(ids.view(np.uint8)))
        return device

    def _pinned(self, source: Payload) -> Tensor:
        """A copy that the device can take: one from other memory waits for it."""
        pinned = self._queue.pinned(source.size)
        pinned.numpy()[:] = source
        return pinned


def _num_staged_pages(run: _Run) -> int:
    return max(1, _MAX_STAGED_BYTES // run.page_bytes)


def _runs_of(
    staged: Tensor, host: Tensor, host_pages: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(of what is staged, of the host's) for consecutive pages of the host."""
    for start, end in contiguous_runs(host_pages):
        yield staged[start:end], host[host_pages[start] :][: end - start]
