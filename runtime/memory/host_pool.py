"""The KV pool in host memory, behind the device's: the same layout, so that a copy is a copy.

layers[i]  [2, num_kv_heads, num_pages * page_size, head_dim]
"""

from __future__ import annotations

from torch import Tensor

from .device_pool import DeviceKVPool, zeros


class HostKVPool:
    """Owns the host's KV memory for the life of the runner; it costs memory once it is written."""

    def __init__(self, device_pool: DeviceKVPool, num_pages: int) -> None:
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
