"""The KV pool in host memory, behind the device's.

Behind a CPU's pool it has the same layout, so that a copy is a copy. Behind a GPU's a page lies in
one piece, so that pages that follow each other cross the bus in one copy of all layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .device_pool import DeviceKVPool, zeros


class HostKVPool:
    """Owns the host's KV memory for the life of the runner; it costs memory once it is written.

    layers[i]  [2, num_kv_heads, num_pages * page_size, head_dim]
    """

    def __init__(self, device_pool: DeviceKVPool, num_pages: int) -> None:
        assert not device_pool.layers[0].is_cuda, "a GPU's host pool is pinned"
        self.num_pages = num_pages
        self.page_size = device_pool.page_size
        num_slots = num_pages * self.page_size
        self.layers: tuple[Tensor, ...] = tuple(
            zeros((*layer.shape[:2], num_slots, layer.shape[3]), layer.dtype, layer.device)
            for layer in device_pool.layers
        )

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


class PinnedKVPool:
    """The same for a GPU: pinned, which takes the memory at once.

    pages  [num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]
    """

    def __init__(self, device_pool: DeviceKVPool, num_pages: int) -> None:
        first = device_pool.layers[0]
        self.num_pages = num_pages
        self.page_size = device_pool.page_size
        shape = (num_pages, len(device_pool.layers), *first.shape[:2], self.page_size)
        self.pages = zeros((*shape, first.shape[3]), first.dtype, torch.device("cpu"))
        if first.is_cuda:
            weakref.finalize(self, _pin(self.pages)).atexit = False

    @property
    def num_bytes(self) -> int:
        """Size of all pages in bytes."""
        return self.pages.nbytes


def _pin(memory: Tensor) -> Callable[[], object]:
    """Lock memory, so that a GPU copies from and to it beside the host; returns what unlocks it.

    (torch's own pinned memory comes in powers of two: of a large pool up to half would be waste.)
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    return partial(runtime.cudaHostUnregister, memory.data_ptr())
