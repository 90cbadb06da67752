"""The KV pool on the compute device: one tensor a layer, addressed by slot.

    layers[i]  [num_pages * page_size, 2, num_kv_heads, head_dim]
               slot = page * page_size + offset; [:, 0] keys (after rotation), [:, 1] values

A token's keys and values lie side by side, so that one gather fetches both (on a CPU rows of 1 KiB
in place of twice as many of 512 B) and a run of pages is one contiguous piece for tier moves.
Page ids only come in from outside; who owns a page is the host half's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_config import ModelConfig


class DeviceKVPool:
    """Owns the KV memory for the life of the runner. All pages, from 0 on, are usable."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages * page_size, 2, config.num_kv_heads, config.head_dim)
        # Zeros cost no memory until a page is written (fresh mappings), and are finite.
        self.layers: tuple[Tensor, ...] = tuple(
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
        )

    @property
    def num_bytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)
