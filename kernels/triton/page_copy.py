"""Whole KV pages of all layers between the pool and one packed tensor, in one launch.

A page's vectors are contiguous on both sides. A program copies some of them for one layer and one
of a token's vectors, as uninterpreted words of up to 8 bytes, two to a load. The layers' addresses
are read from a table, made once. Everything is read once and written once; the bus to the host,
which these copies serve, is 50 times slower than that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .language import tl, triton

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_TILE = 1024  # words of a program


class PageCopy:
    """See `ops.PageCopy`; refers to the layers' memory."""

    def __init__(self, layers: Sequence[Tensor], page_size: int) -> None:
        first = layers[0]
        assert all(layer.is_contiguous() and layer.shape == first.shape for layer in layers)
        self._num_vectors, self._num_slots, self._width = first.shape
        assert self._num_slots % page_size == 0, "whole pages"
        self._dtype = first.dtype
        self._page_size = page_size
        self._layers = tuple(layers)  # keeps them alive; the table of addresses does not
        addresses = [layer.data_ptr() for layer in layers]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=first.device)

    def pack(self, pages: Tensor, packed: Tensor) -> None:
        self._run(pages, packed, is_pack=True)

    def unpack(self, pages: Tensor, packed: Tensor) -> None:
        self._run(pages, packed, is_pack=False)

    def _run(self, pages: Tensor, packed: Tensor, is_pack: bool) -> None:
        num_layers, num_vectors, num_pages, page_size, width = packed.shape
        expected = (len(self._layers), self._num_vectors, len(pages), self._page_size)
        assert packed.shape == (*expected, self._width) and packed.dtype is self._dtype
        assert packed.stride()[3:] == (width, 1), "a page's vectors are contiguous"
        if not num_pages:
            return
        steps = (page_size * width, packed.storage_offset(), *packed.stride()[:3])
        word_bytes = math.gcd(8, *(step * packed.itemsize for step in steps))
        words = packed.flatten(3).view(_WORDS[word_bytes])
        size = words.shape[-1]
        block = min(_TILE, triton.next_power_of_2(size))
        num_tile_pages = _TILE // block
        strides = words.stride()[:3]
        unit = math.gcd(16 // words.itemsize, *strides)  # of what a load takes at most
        grid = (
            triton.cdiv(num_pages, num_tile_pages),
            num_layers * num_vectors,
            triton.cdiv(size, block),
        )
        _copy_pages[grid](
            self._table, pages, words, num_pages, self._num_slots // page_size,
            *(stride // unit for stride in strides),
            NUM_VECTORS=num_vectors, SIZE=size, BLOCK=block, PAGES=num_tile_pages,
            UNIT=unit, IS_PACK=is_pack, num_warps=4,
        )  # fmt: skip


# The packed tensor's strides change with its number of pages; what they are a multiple of does not.
@triton.jit(do_not_specialize=["num_pages", "layer_stride", "vector_stride", "page_stride"])
def _copy_pages(
    table, pages, packed, num_pages, num_pool_pages,
    layer_stride, vector_stride, page_stride,
    NUM_VECTORS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGES: tl.constexpr,
    UNIT: tl.constexpr, IS_PACK: tl.constexpr,
):  # fmt: skip
    """PAGES pages of one layer's vector, BLOCK words of each; strides in units of UNIT words."""
    index = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    vector = (tl.program_id(1) % NUM_VECTORS).to(tl.int64)
    layer = (tl.program_id(1) // NUM_VECTORS).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_inside = (index < num_pages)[:, None] & (words < SIZE)[None, :]
    page = tl.load(pages + index, mask=index < num_pages, other=0).to(tl.int64)
    pool = tl.load(table + layer).to(tl.pointer_type(packed.dtype.element_ty))
    # NOTE: torch aligns memory to 16 bytes at least, which the compiler cannot know of a number.
    pool = tl.multiple_of(pool, 16)
    in_pool = pool + ((vector * num_pool_pages + page) * SIZE)[:, None] + words[None, :]
    first = (layer * layer_stride + vector * vector_stride) * UNIT
    in_page = (index.to(tl.int64) * page_stride)[:, None] * UNIT + words[None, :]
    in_packed = packed + first + in_page
    if IS_PACK:
        tl.store(in_packed, tl.load(in_pool, mask=is_inside), mask=is_inside)
    else:
        tl.store(in_pool, tl.load(in_packed, mask=is_inside), mask=is_inside)
