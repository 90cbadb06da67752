"""The GPU's latent attention in Triton's interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_trees import Branch, row, rows_of

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.reference import latent_attention as reference
from stemma.kernels.reference import paged_attention as full_reference
from stemma.kernels.triton import latent_attention as latent

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
LATENT_DIM, ROPE_DIM = 64, 16

DECODE = [row(1, 1), row(1, 15), row(1, 16), row(1, 17), row(1, 33)]
LONG = [row(1, 600)]  # in parts
EXTEND = [row(20, 20), row(9, 43)]
MIXED = [row(1, 33), row(20, 50), row(2, 30)]
TREE = [
    Branch(2, (Branch(3, (Branch(1), Branch(1, num_queries=3, num_own=9))), Branch(1))),
    row(1, 20),
]
STEPS = {"decode": DECODE, "long": LONG, "extend": EXTEND, "mixed": MIXED, "tree": TREE}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_gives_what_the_reference_gives(step: str, dtype: torch.dtype) -> None:
    _check(rows_of(STEPS[step], 16), dtype=dtype)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("step", ["mixed", "tree"])
def test_pages_may_have_any_size(step: str, page_size: int) -> None:
    _check(rows_of(STEPS[step], page_size))


@pytest.mark.parametrize(
    ("num_heads", "latent_dim", "rope_dim", "dtype"),
    [
        (16, 128, 32, torch.float16),
        (5, 64, 16, torch.float32),  # no power of two: rows of a tile that no head has
        (20, 64, 16, torch.float32),  # more heads than a tile of float32 has rows
        (20, 64, 16, torch.float16),  # a tile of 32
        (40, 32, 16, torch.float16),  # of 64
        (72, 32, 16, torch.float16),  # more heads than that
        (4, 96, 24, torch.float32),  # sizes that are padded
        (4, 80, 8, torch.float16),
    ],
)
def test_heads_of_any_shape(
    num_heads: int, latent_dim: int, rope_dim: int, dtype: torch.dtype
) -> None:
    rows = rows_of([row(1, 20), row(3, 40)], 4)
    _check(rows, num_heads=num_heads, latent_dim=latent_dim, rope_dim=rope_dim, dtype=dtype)


def test_it_is_attention_whose_values_are_the_latents_of_its_keys() -> None:
    """The two references agree: paged attention of one KV head, values padded with zeros."""
    rows = rows_of(TREE, 4)
    q_latent, q_rope, kv_layer = _inputs(rows)
    values = kv_layer.clone()
    values[:, LATENT_DIM:] = 0
    plan = full_reference.plan_attention(rows, torch.empty(0), 4)
    q = torch.cat((q_latent, q_rope), -1)
    expected = full_reference.paged_attention(q, torch.stack((kv_layer, values))[:, None], plan)
    found = _reference(q_latent, q_rope, kv_layer, rows, (LATENT_DIM + ROPE_DIM) ** -0.5)
    torch.testing.assert_close(found, expected[..., :LATENT_DIM])


def test_scores_too_large_for_an_exponential_are_merged_all_the_same() -> None:
    rows = rows_of([*TREE, row(1, 300)], 4)
    q_latent, q_rope, kv_layer = _inputs(rows)
    _check_close(q_latent * 100, q_rope * 100, kv_layer * 30, rows, 1e-2)


def test_scores_that_all_lie_far_below_zero() -> None:
    """All the same: each row gets the mean of what it sees."""
    rows = rows_of([row(1, 20), row(20, 30)], 4)
    q_latent, q_rope, kv_layer = _inputs(rows)
    kv_layer[:, LATENT_DIM:] = 100.0
    _check_close(q_latent * 0, torch.full_like(q_rope, -100.0), kv_layer, rows, 1e-5)


def test_queries_may_be_heads_first_and_parts_of_longer_ones() -> None:
    """As a batched product with W_UK leaves them, and the rotated part of a projection."""
    rows = rows_of(MIXED, 16)
    q_latent, q_rope, kv_layer = _inputs(rows)
    heads_first = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    projected = torch.cat((torch.full_like(q_latent, torch.nan), q_rope), -1)[..., LATENT_DIM:]
    _check_close(heads_first, projected, kv_layer, rows, 1e-5)


def test_a_row_of_many_parts_gives_the_same_in_any_step() -> None:
    """Bit for bit: how a row is cut depends on its own lengths."""
    both = rows_of([row(1, 300), row(5, 140), row(1, 40), row(1, 530)], 16)
    q_latent, q_rope, kv_layer = _inputs(both)
    found = _run(q_latent, q_rope, kv_layer, both)
    for index in range(both.num_rows):
        tokens = slice(int(both.query_start[index]), int(both.query_start[index + 1]))
        alone = AttentionRows(
            np.array([0, tokens.stop - tokens.start], dtype=np.int32),
            both.seq_lens[index : index + 1],
            both.page_table,
            both.table_rows[index : index + 1],
            both.page_size,
        )
        assert torch.equal(_run(q_latent[tokens], q_rope[tokens], kv_layer, alone), found[tokens])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("step", STEPS)
def test_padding_changes_nothing_and_gets_zeros(step: str) -> None:
    rows = rows_of(STEPS[step], 16)
    q_latent, q_rope, kv_layer = _inputs(rows)
    padding = torch.full((7, *q_latent.shape[1:]), torch.nan)
    padded = torch.cat((q_latent, padding)), torch.cat((q_rope, padding[..., :ROPE_DIM]))
    found = _run(*padded, kv_layer, rows, padded_tokens=len(padded[0]))
    assert torch.equal(found[: len(q_latent)], _run(q_latent, q_rope, kv_layer, rows))
    assert not found[len(q_latent) :].count_nonzero()


def test_a_bound_plan_serves_other_steps_through_its_arrays() -> None:
    """As a captured graph does: the arrays and the page table are overwritten, nothing else."""
    copies: dict[str, torch.Tensor] = {}
    device_table = torch.zeros(8, 64, dtype=torch.int32)
    bound: object = None
    for step in ("tree", "mixed", "decode"):
        rows = _in_a_table_of(rows_of(STEPS[step], 16), tuple(device_table.shape))
        q_latent, q_rope, kv_layer = _inputs(rows, num_slots=1024, num_tokens=64)
        plan = latent.plan_latent_attention(rows, kv_layer, 4, 0.1, 64)
        if bound is None:
            copies = {
                name: torch.empty(a.shape, dtype=torch.int32) for name, a in plan.arrays.items()
            }
            bound = plan.bind(copies, device_table)
        for name, array in plan.arrays.items():
            copies[name].copy_(torch.from_numpy(array))
        device_table.copy_(torch.from_numpy(rows.page_table))
        found = latent.latent_attention(q_latent, q_rope, kv_layer, bound)
        num_tokens = int(rows.query_start[-1])
        expected = _reference(q_latent[:num_tokens], q_rope[:num_tokens], kv_layer, rows, 0.1)
        torch.testing.assert_close(found[:num_tokens], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [576, 40])
def test_latents_are_stored_where_their_slots_say(size: int, dtype: torch.dtype) -> None:
    """From a slice of a projection, and with padding tokens that share a slot."""
    projected = torch.randn(5, size + 8).to(dtype)
    slots = torch.tensor([7, 2, 11, 3, 3])
    projected[4] = projected[3]
    found = torch.zeros(12, size, dtype=dtype)
    expected = found.clone()
    latent.store_latent(projected[:, :size], found, slots)
    reference.store_latent(projected[:, :size], expected, slots)
    assert torch.equal(found, expected) and found.any(1).sum() == 4


def _check(
    rows: AttentionRows,
    *,
    num_heads: int = 4,
    latent_dim: int = LATENT_DIM,
    rope_dim: int = ROPE_DIM,
    dtype: torch.dtype = torch.float32,
) -> None:
    inputs = _inputs(rows, num_heads, latent_dim, rope_dim)
    q_latent, q_rope, kv_layer = (tensor.to(dtype) for tensor in inputs)
    _check_close(q_latent, q_rope, kv_layer, rows, TOLERANCE[dtype])


def _check_close(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: AttentionRows,
    tolerance: float,
) -> None:
    expected = _reference(q_latent, q_rope, kv_layer, rows)
    assert expected.isfinite().all()
    found = _run(q_latent, q_rope, kv_layer, rows)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def _inputs(
    rows: AttentionRows,
    num_heads: int = 4,
    latent_dim: int = LATENT_DIM,
    rope_dim: int = ROPE_DIM,
    num_slots: int | None = None,
    num_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_latent, q_rope, kv_layer in float32; NaN in every slot that no row has."""
    num_slots = num_slots or (int(rows.page_table.max()) + 1) * rows.page_size
    num_tokens = num_tokens or int(rows.query_start[-1])
    generator = torch.Generator().manual_seed(num_slots)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    kv_layer = torch.full((num_slots, latent_dim + rope_dim), torch.nan)
    for index, seq_len in enumerate(rows.seq_lens.tolist()):
        slots = torch.from_numpy(rows.slots(index, 0, seq_len))
        kv_layer[slots] = normal(seq_len, latent_dim + rope_dim)
    return (
        normal(num_tokens, num_heads, latent_dim),
        normal(num_tokens, num_heads, rope_dim),
        kv_layer,
    )


def _run(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: AttentionRows,
    padded_tokens: int | None = None,
) -> torch.Tensor:
    plan = latent.plan_latent_attention(rows, kv_layer, q_latent.shape[1], 0.1, padded_tokens)
    copies = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
    bound = plan.bind(copies, torch.from_numpy(rows.page_table))
    return latent.latent_attention(q_latent, q_rope, kv_layer, bound)


def _reference(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: AttentionRows,
    scale: float = 0.1,
) -> torch.Tensor:
    plan = reference.plan_latent_attention(rows, kv_layer, q_latent.shape[1], scale)
    return reference.latent_attention(q_latent, q_rope, kv_layer, plan)


def _in_a_table_of(rows: AttentionRows, shape: tuple[int, ...]) -> AttentionRows:
    table = np.zeros(shape, dtype=np.int32)
    table[: len(rows.page_table), : rows.page_table.shape[1]] = rows.page_table
    return AttentionRows(
        rows.query_start, rows.seq_lens, table, rows.table_rows, rows.page_size, rows.segments
    )
