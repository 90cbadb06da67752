"""Latent attention on a CPU against the reference, over steps of all kinds."""

from __future__ import annotations

import pytest
import torch
from attention_trees import Branch, branches, row, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.cpu import latent_attention as latent
from stemma.kernels.reference import latent_attention as reference

# Largest difference allowed, of results of about 1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}
SCALE = 0.3
LATENT_DIM, ROPE_DIM = 24, 8


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=25, deadline=None)
@given(st.lists(branches, min_size=1, max_size=3), st.sampled_from([1, 4]), st.sampled_from([1, 5]))
def test_trees_of_rows_give_what_the_reference_gives(
    dtype: torch.dtype, forest: list[Branch], page_size: int, num_heads: int
) -> None:
    _check(rows_of(forest, page_size), num_heads, dtype)


@pytest.mark.parametrize("num_heads", [16, 600])
def test_prompts_in_several_blocks_give_what_the_reference_gives(num_heads: int) -> None:
    """Of 64 queries, and of one each."""
    num_queries = 150 if num_heads == 16 else 4
    _check(rows_of([row(num_queries, 170), row(1, 9)], 16), num_heads, torch.float32)


def test_a_row_gives_the_same_bits_in_any_step() -> None:
    both = rows_of([row(1, 40), row(5, 60)], 4)
    q_latent, q_rope, kv_layer = _inputs(both, 4, torch.float32)
    found = _run(q_latent, q_rope, kv_layer, both)
    alone = AttentionRows(
        both.query_start[:2], both.seq_lens[:1], both.page_table, both.table_rows[:1], 4
    )
    assert torch.equal(_run(q_latent[:1], q_rope[:1], kv_layer, alone), found[:1])


def _check(rows: AttentionRows, num_heads: int, dtype: torch.dtype) -> None:
    q_latent, q_rope, kv_layer = _inputs(rows, num_heads, dtype)
    plan = reference.plan_latent_attention(rows, kv_layer, num_heads, SCALE)
    expected = reference.latent_attention(q_latent, q_rope, kv_layer, plan)
    found = _run(q_latent, q_rope, kv_layer, rows)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=0)


def _run(
    q_latent: torch.Tensor, q_rope: torch.Tensor, kv_layer: torch.Tensor, rows: AttentionRows
) -> torch.Tensor:
    plan = latent.plan_latent_attention(rows, kv_layer, q_latent.shape[1], SCALE)
    return latent.latent_attention(q_latent, q_rope, kv_layer, plan)


def _inputs(
    rows: AttentionRows, num_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries with their heads first, and a KV whose last page, no row's, is not a number."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = int(rows.query_start[-1])
    num_slots = (int(rows.page_table.max()) + 1) * rows.page_size
    q_latent = torch.randn(num_heads, num_tokens, LATENT_DIM, generator=generator).to(dtype)
    q_rope = torch.randn(num_tokens, num_heads, ROPE_DIM, generator=generator).to(dtype)
    kv_layer = torch.randn(num_slots, LATENT_DIM + ROPE_DIM, generator=generator).to(dtype)
    kv_layer[num_slots - rows.page_size :] = torch.nan
    return q_latent.transpose(0, 1), q_rope, kv_layer
