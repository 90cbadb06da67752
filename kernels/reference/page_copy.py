"""Whole KV pages between the pool and one packed tensor, in plain torch: the truth."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class PageCopy:
    """See `ops.PageCopy`."""

    def __init__(self, layers: Sequence[Tensor], page_size: int) -> None:
        # Each [num_vectors, num_pages, page_size, width].
        self._layers = [
            layer.view(layer.shape[0], -1, page_size, layer.shape[2]) for layer in layers
        ]

    def pack(self, pages: Tensor, packed: Tensor) -> None:
        for layer, target in zip(self._layers, packed, strict=True):
            target.copy_(layer.index_select(1, pages))

    def unpack(self, pages: Tensor, packed: Tensor) -> None:
        for layer, source in zip(self._layers, packed, strict=True):
            layer.index_copy_(1, pages, source)
