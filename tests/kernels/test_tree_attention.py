"""Attention over shared segments, once for all their rows, against every row by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_trees import Branch, branches, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.registry import KernelMode, select_kernels

NUM_HEADS, NUM_KV_HEADS = 6, 2
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.05}
FAST: tuple[KernelMode, ...] = ("cpu", "auto")


@settings(max_examples=60, deadline=None)
@given(
    forest=st.lists(branches, min_size=1, max_size=3),
    page_size=st.sampled_from([1, 16]),
    head_dim=st.sampled_from([8, 16, 64]),
    min_rows=st.sampled_from([1, 2]),
)
def test_any_tree_gives_what_each_row_gives_alone(
    forest: list[Branch], page_size: int, head_dim: int, min_rows: int
) -> None:
    """With `min_rows` 1 also segments of a single row, which no planner would choose."""
    rows = rows_of(forest, page_size, min_rows)
    for dtype, tolerance in TOLERANCE.items():
        generator = torch.Generator().manual_seed(page_size)
        num_slots = (int(rows.page_table.max()) + 1) * page_size
        shape = (2, NUM_KV_HEADS, num_slots, head_dim)
        kv_layer = torch.randn(shape, generator=generator).to(dtype)
        q = torch.randn(int(rows.query_start[-1]), NUM_HEADS, head_dim, generator=generator) * 2
        q = q.to(dtype)
        expected, *found = _outputs(q, kv_layer, rows, ("reference", *FAST))
        for out in found:
            error = (out.double() - expected.double()).abs().max().item()
            assert error <= tolerance * max(1.0, expected.abs().max().item()), (dtype, error)


def test_a_long_shared_prefix_of_many_rows() -> None:
    """More query rows than one unit of work takes, and keys past many blocks."""
    forest = [Branch(700, tuple(Branch(1, num_own=5 + i) for i in range(80)))]
    rows = rows_of(forest, 1, 2)
    generator = torch.Generator().manual_seed(0)
    num_slots = int(rows.page_table.max()) + 1
    kv_layer = torch.randn(2, NUM_KV_HEADS, num_slots, 32, generator=generator).bfloat16()
    q = torch.randn(80, NUM_HEADS, 32, generator=generator).bfloat16()
    expected, *found = _outputs(q, kv_layer, rows, ("reference", *FAST))
    for out in found:
        torch.testing.assert_close(out, expected, atol=0.01, rtol=0.02)


def test_scores_too_large_for_an_exponential_are_merged_all_the_same() -> None:
    rows = rows_of([Branch(20, (Branch(2), Branch(2)))], 1, 2)
    generator = torch.Generator().manual_seed(0)
    kv_layer = torch.randn(2, NUM_KV_HEADS, 64, 16, generator=generator).bfloat16() * 30
    q = torch.randn(2, NUM_HEADS, 16, generator=generator).bfloat16() * 30
    expected, *found = _outputs(q, kv_layer, rows, ("reference", *FAST))
    assert expected.isfinite().all()
    for out in found:
        torch.testing.assert_close(out, expected, atol=0.2, rtol=0.02)


@pytest.mark.parametrize("page_size", [1, 16])
def test_own_kv_begins_where_the_last_segment_of_a_row_ends(page_size: int) -> None:
    forest = [Branch(3, (Branch(2, (Branch(1), Branch(1))), Branch(1)))]
    rows = rows_of(forest, page_size, 2)
    ends = np.array([[0, 3, 0, 3], [3, 5, 0, 2]]) * [page_size, page_size, 1, 1]
    assert rows.segments.tolist() == ends.tolist()
    assert rows.own_start().tolist() == [5 * page_size, 5 * page_size, 3 * page_size]


def _outputs(
    q: torch.Tensor, kv_layer: torch.Tensor, rows: AttentionRows, modes: tuple[KernelMode, ...]
) -> list[torch.Tensor]:
    kernels = [select_kernels(q.dtype, mode=mode) for mode in modes]
    return [
        k.paged_attention(q, kv_layer, k.plan_attention(rows, kv_layer, NUM_HEADS)) for k in kernels
    ]
