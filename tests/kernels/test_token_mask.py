"""Packed token masks: each implementation against a plain one, at edges of words and chunks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from stemma.kernels.cpu import sampling as cpu
from stemma.kernels.native import token_mask as native
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import ApplyTokenMask
from stemma.kernels.reference import sampling as reference
from stemma.kernels.triton import token_mask as triton


def implementations() -> Iterator[ApplyTokenMask]:
    yield reference.apply_token_mask
    yield cpu.apply_token_mask
    if why_not_native(torch.bfloat16) is None:
        yield native.apply_token_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 260, 32 * 1024, 32 * 1024 + 1, 70_001])
def test_exactly_what_is_not_allowed_becomes_minus_infinity(
    vocab_size: int, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(vocab_size)
    is_allowed = rng.random((3, vocab_size)) < np.array([[0.5], [0.0], [1.0]])
    padded = np.zeros((3, -(-vocab_size // 32) * 32), dtype=bool)
    padded[:, :vocab_size] = is_allowed
    packed = np.packbits(padded, bitorder="little").view(np.int32).reshape(3, -1)
    rows = [4, 0, 3]
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size))).to(dtype)
    expected = logits.clone()
    for row, allowed in zip(rows, is_allowed):
        expected[row, torch.from_numpy(~allowed)] = -torch.inf
    ops = [*implementations(), *([triton.apply_token_mask] if dtype is torch.float32 else [])]
    for apply_token_mask in ops:
        found = logits.clone()
        apply_token_mask(found, torch.tensor(rows), torch.from_numpy(packed))
        assert torch.equal(found, expected), apply_token_mask.__module__


def test_a_mask_of_all_ones_may_pad_a_batch_under_any_row_on_a_gpu() -> None:
    logits = torch.zeros(3, 40)
    masks = torch.tensor([[1, 0], [-1, -1], [-1, -1]], dtype=torch.int32)
    triton.apply_token_mask(logits, torch.tensor([1, 1, 0]), masks)
    assert torch.isinf(logits).sum(dim=1).tolist() == [0, 39, 0]
