"""The KV pool in host memory, the tier behind the device's.

For a CPU's pool it has the same layout, so that copies need no conversion. For a GPU's some layers
of a page are contiguous, so that consecutive pages cross the bus in one copy of these layers, and
the first layers before the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .device_pool import DeviceKVPool, zeroed_parts, zeros
from .kv_layout import KVLayout

# A step begins when the first run of layers is there, and each run is launches and copies of its
# own: with four a step waits for a quarter of what it reads (a guess).
MAX_RUNS = 4


class HostKVPool:
    """Owns the host's KV memory for the life of the runner; memory is taken when first written.

    parts[p][i]  [num_vectors, num_pages * page_size, vector_bytes] uint8
    """

    def __init__(self, device_pool: DeviceKVPool, num_pages: int) -> None:
        """Raises InvalidRequest where the system does not give so much memory."""
        device = device_pool.parts[0][0].device
        assert device.type == "cpu", "a GPU's host pool is pinned"
        self.num_pages = num_pages
        self.page_size = device_pool.page_size
        num_slots = num_pages * self.page_size
        self.parts = zeroed_parts(device_pool.layout, num_slots, device, "host_kv_tokens")

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(tensor.nbytes for part in self.parts for tensor in part)


class PinnedKVPool:
    """The same for a GPU: pinned, so all its memory is taken at once.

    runs[r]   layers that are copied together
    pages[r]  [num_pages, bytes of a page in these layers] uint8; a page is part after part, each
              [layers that have it, num_vectors, page_size, vector_bytes]
    """

    def __init__(self, device_pool: DeviceKVPool, num_pages: int) -> None:
        self.num_pages = num_pages
        self.page_size = device_pool.page_size
        layout = device_pool.layout
        self.runs = layout.runs(MAX_RUNS)
        sizes = [num_pages * self.page_size * bytes_per_token(layout, run) for run in self.runs]
        self._memory = zeros((sum(sizes),), torch.device("cpu"))
        self.pages = tuple(part.view(num_pages, -1) for part in torch.split(self._memory, sizes))
        if device_pool.parts[0][0].is_cuda:
            weakref.finalize(self, pin(self._memory)).atexit = False

    @property
    def num_bytes(self) -> int:
        """Size of all pages in bytes."""
        return self._memory.nbytes


def bytes_per_token(layout: KVLayout, run: range) -> int:
    """In a run of layers."""
    numbers = [len(layout.layers_of(part)[layout.within(part, run)]) for part in layout.parts]
    return sum(
        number * part.bytes_per_token for number, part in zip(numbers, layout.parts, strict=True)
    )


def pin(memory: Tensor) -> Callable[[], object]:
    """Lock memory, so that a GPU copies from and to it asynchronously; returns what unlocks it.

    (torch rounds pinned memory up to powers of two: up to half of a large pool would be wasted.)
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
    return partial(runtime.cudaHostUnregister, memory.data_ptr())
