"""Copies KV between a GPU and the host, bit by bit, as plans say: queued, not waited for.

    device layers --pack--> staged pages --one copy a run of host pages--> pinned pool
    device layers <-unpack- staged pages <--------------------------------

Everything goes to the queue in which steps are computed, in plan order, which is all the order that
plans need; a kernel packs the pages of all layers in one launch, and a run of host pages is one
copy. What the host is to get (blocks for the disk) lies in pinned memory of its own, to be read
when the step's results are. docs/tiers.md says what that costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.ops import MakePageCopy
from ..step import BlockRestore, BlockSave, TierCopy, Transfer
from .block_file import Payload
from .block_key import BLOCK_TOKENS
from .device_pool import DeviceKVPool
from .host_pool import PinnedKVPool
from .transfer import contiguous_runs

# Device memory of a staging buffer, as long as a copy takes several tens of launches' time (a
# guess).
_MAX_STAGED_BYTES = 64 << 20


class Moment(Protocol):
    """A moment in the order of queued work."""

    def wait(self) -> None:
        """Block the host until all that was queued before is done."""


class CopyQueue(Protocol):
    """The part of an accelerator that copies need; what is queued is done in order."""

    device: torch.device

    def pinned(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of pinned host memory; it outlives the copies that were queued."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between pinned memory and the device, of one dtype and shape."""

    def event(self) -> Moment:
        """The moment after all that was queued so far."""


@dataclass(frozen=True, slots=True)
class QueuedCopies:
    """The copies of one plan, which may still be pending."""

    saved: tuple[Tensor, ...]  # each a block's bytes, pinned
    done: Moment

    def payloads(self) -> tuple[Payload, ...]:
        """Of the plan's BlockSaves, in their order; waits for the copies where there are any. A
        payload's memory is its own."""
        if self.saved:
            self.done.wait()
        return tuple(block.numpy() for block in self.saved)


class QueuedKVTransfer:
    """Queues the copies of one device's plans, in their order. Called where steps are queued, so
    that they lie between the steps before and after."""

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
        self._pages = make_page_copy(device_pool.layers, self._page_size)
        layer = device_pool.layers[0]
        self._dtype = layer.dtype
        self._layer_shape = (len(device_pool.layers), *layer.shape[:2])
        self._token_shape = (self._page_size, layer.shape[3])

    def run(self, copies: Iterable[TierCopy]) -> QueuedCopies:
        """Queue the copies; what is queued later finds them done."""
        saved = []
        for copy in copies:
            if isinstance(copy, Transfer):
                self._transfer(copy)
            elif isinstance(copy, BlockSave):
                saved.append(self._save(copy))
            else:
                self._restore(copy)
        return QueuedCopies(tuple(saved), self._queue.event())

    def _transfer(self, transfer: Transfer) -> None:
        assert self._host is not None, "a plan has transfers, but there is no host pool"
        num_pages = max(1, _MAX_STAGED_BYTES // self._host[0].nbytes)
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
        on_device = self._on_device(device_pages)
        shape = (len(host_pages), *self._layer_shape, *self._token_shape)
        staged = torch.empty(shape, dtype=self._dtype, device=self._queue.device)
        packed = staged.permute(1, 2, 3, 0, 4, 5)
        if is_store:
            self._pages.pack(on_device, packed)
        for start, end in contiguous_runs(host_pages):
            here, there = staged[start:end], host[host_pages[start] :][: end - start]
            if is_store:
                self._queue.copy(there, here)
            else:
                self._queue.copy(here, there)
        if not is_store:
            self._pages.unpack(on_device, packed)

    def _save(self, save: BlockSave) -> Tensor:
        block = self._empty_block()
        self._pages.pack(self._on_device(save.pages), block)
        payload = self._queue.pinned(block.nbytes)
        self._queue.copy(payload, block.view(torch.uint8).view(-1))
        return payload

    def _restore(self, restore: BlockRestore) -> None:
        block = self._empty_block()
        assert restore.payload.size == block.nbytes, f"{restore.payload.size} bytes for a block"
        first, misfit = divmod(restore.first_token, self._page_size)
        assert not misfit, "a block is restored from the start of a page on"
        self._copy_in(block.view(torch.uint8).view(-1), restore.payload)
        self._pages.unpack(
            self._on_device(restore.pages), block[:, :, :, first : first + len(restore.pages)]
        )

    def _empty_block(self) -> Tensor:
        """[num_layers, 2, num_kv_heads, pages of a block, page_size, head_dim] on the device: in
        this order a block's payload."""
        shape = (*self._layer_shape, BLOCK_TOKENS // self._page_size, *self._token_shape)
        return torch.empty(shape, dtype=self._dtype, device=self._queue.device)

    def _on_device(self, pages: Sequence[int]) -> Tensor:
        """[len(pages)] int64"""
        ids = np.array(pages, dtype=np.int64)
        device = torch.empty(len(ids), dtype=torch.int64, device=self._queue.device)
        self._copy_in(device.view(torch.uint8), ids.view(np.uint8))
        return device

    def _copy_in(self, target: Tensor, source: Payload) -> None:
        """Through pinned memory, for a copy out of any other waits for the device."""
        pinned = self._queue.pinned(source.size)
        pinned.numpy()[:] = source
        self._queue.copy(target, pinned)
