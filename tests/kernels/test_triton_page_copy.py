"""Page copies: Triton in the interpreter against the reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from stemma.kernels.reference.kv_store import PageCopy
from stemma.kernels.registry import select_kernels

NUM_LAYERS, NUM_VECTORS, NUM_PAGES = 2, 4, 9


@pytest.mark.parametrize("is_page_first", [False, True])
@pytest.mark.parametrize(
    ("dtype", "page_size", "width"),
    [
        (torch.bfloat16, 1, 64),
        (torch.float16, 16, 80),
        (torch.float32, 2, 3),
        (torch.bfloat16, 1, 3),
        (torch.bfloat16, 48, 96),
        (torch.uint8, 1, 4),
        (torch.uint8, 16, 128),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_pages", [0, 1, 5])
def test_pages_are_packed_and_unpacked_bit_by_bit(
    dtype: torch.dtype, page_size: int, width: int, num_pages: int, is_page_first: bool
) -> None:
    make_page_copy = select_kernels(torch.float32, mode="triton").make_page_copy
    shape = (NUM_VECTORS, NUM_PAGES * page_size, width)
    source = [_random_bits(dtype, *shape) for _ in range(NUM_LAYERS)]
    pages = torch.randperm(NUM_PAGES)[:num_pages]
    expected = torch.zeros(NUM_LAYERS, NUM_VECTORS, num_pages, page_size, width, dtype=dtype)
    PageCopy(source, page_size).pack(pages, expected)
    found = torch.zeros_like(expected)
    if is_page_first:
        found = found.permute(2, 0, 1, 3, 4).contiguous().permute(1, 2, 0, 3, 4)
    make_page_copy(source, page_size).pack(pages, found)
    assert torch.equal(_bits(found), _bits(expected))
    target = [torch.zeros_like(layer) for layer in source]
    make_page_copy(target, page_size).unpack(pages, found)
    slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
    for layer, given in zip(target, source, strict=True):
        assert torch.equal(_bits(layer[:, slots]), _bits(given[:, slots]))
        layer[:, slots] = 0
        assert not _bits(layer).any()


def _random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.empty(shape, dtype=dtype)
    values.view(torch.uint8).random_(0, 256)
    return values


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
