"""The GPU's attention in Triton's interpreter, against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_trees import Branch, quantized, random_kv, row, rows_of

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.kernels.ops import KVLayer
from stemma.kernels.reference import paged_attention as reference
from stemma.kernels.triton import paged_attention as triton_attention
from stemma.kernels.triton.multiprocessors import MULTIPROCESSORS

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}

DECODE = [row(1, 1), row(1, 15), row(1, 16), row(1, 17), row(1, 64), row(1, 65)]
LONG = [row(1, 400)]  # in parts
EXTEND = [row(40, 40), row(20, 83)]
MIXED = [row(1, 33), row(40, 70), row(2, 50)]
TREE = [
    Branch(
        2,
        (
            Branch(3, (Branch(1), Branch(1, num_queries=3, num_own=9))),
            Branch(1, num_own=30),
            Branch(1, num_queries=5),
        ),
    ),
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
    "num_heads, num_kv_heads, head_dim",
    [
        (1, 1, 64),  # MHA
        (2, 2, 32),
        (3, 1, 64),  # a group that is no power of two
        (10, 2, 16),
        (8, 1, 64),  # MQA
        (20, 1, 32),  # more heads than a narrow tile of 16 holds
        (72, 1, 16),  # than one of 64
        (144, 1, 16),  # than a wide one
        (4, 1, 80),  # a head that is padded
        (2, 1, 112),
        (2, 1, 128),
        (2, 1, 192),
        (2, 1, 256),
    ],
)
def test_heads_of_any_shape(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    chunk = row(34, 40) if num_heads < 40 else row(2, 18)
    rows = rows_of([row(1, 20), chunk], 4)
    _check(rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)


@pytest.mark.parametrize("capability", [89, 100])
@pytest.mark.parametrize("num_heads", [2, 72])
def test_other_gpus_tiles_give_the_same(
    capability: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows and keys, at the widest heads, where they differ."""
    other = MULTIPROCESSORS[capability]
    monkeypatch.setattr(triton_attention, "multiprocessor_of", lambda device: other)
    rows = rows_of([row(1, 20), row(34, 40) if num_heads < 40 else row(2, 18)], 4)
    for dtype in TOLERANCE:
        _check(rows, dtype=dtype, num_heads=num_heads, num_kv_heads=1, head_dim=256)


OPTIONS = {
    "window": AttentionOptions(window=20),
    "window of a block": AttentionOptions(window=64),
    "window of one": AttentionOptions(window=1),
    "sinks": AttentionOptions(window=12, num_sink_tokens=3),
    "more sinks than window": AttentionOptions(window=4, num_sink_tokens=30),
    "cap": AttentionOptions(soft_cap=2.0),
    "scale": AttentionOptions(scale=0.3),
    "chunks": AttentionOptions(chunk=9),
    "chunks of pages": AttentionOptions(chunk=32, soft_cap=3.0),
    "a chunk for all": AttentionOptions(chunk=5000),
    "all": AttentionOptions(scale=0.2, window=40, num_sink_tokens=2, soft_cap=3.0),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("step", ["mixed", "tree"])
def test_options(step: str, options: AttentionOptions) -> None:
    _check(rows_of(STEPS[step], 4), options=options)


def test_a_window_over_many_blocks() -> None:
    _check(rows_of([row(40, 300), row(1, 300)], 16), options=AttentionOptions(window=150))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("step, size", [("mixed", 1.0), ("tree", 1.0), ("mixed", 1e-3)])
def test_quantized_kv(step: str, dtype: torch.dtype, size: float) -> None:
    """Also where a value's scale would not be a normal float16."""
    rows = rows_of(STEPS[step], 4)
    kv_layer = quantized(random_kv(rows, 1, 64) * torch.tensor([1.0, size]).view(2, 1, 1, 1), dtype)
    q = _queries(rows, 4, 64).half()
    found, expected = _run(q, kv_layer, rows), _reference(q, kv_layer, rows)
    torch.testing.assert_close(found, expected, atol=4e-3 * size, rtol=1e-2)


@pytest.mark.parametrize("size", [1e-3, 1.0, 500.0])
def test_queries_of_any_size_over_quantized_kv(size: float) -> None:
    """A tile's are divided by a power of two; a group of 20 heads has the tile of 32 rows."""
    rows = rows_of([row(1, 33), row(1, 80)], 4)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for num_heads in (4, 20):
            kv_layer = quantized(random_kv(rows, 1, 80) / max(size, 1.0), dtype)
            q = (_queries(rows, num_heads, 80) * size).half()
            found, expected = _run(q, kv_layer, rows), _reference(q, kv_layer, rows)
            torch.testing.assert_close(found, expected, atol=4e-3 / max(size, 1.0), rtol=1e-2)


def test_scores_too_large_for_an_exponential_are_merged_all_the_same() -> None:
    rows = rows_of([*TREE, row(1, 300)], 4)
    kv_layer = random_kv(rows, 1, 64) * 30
    q = _queries(rows, 4, 64) * 100
    expected = _reference(q, kv_layer, rows)
    assert expected.isfinite().all()
    torch.testing.assert_close(_run(q, kv_layer, rows), expected, atol=1e-2, rtol=1e-3)


def test_scores_that_all_lie_far_below_zero() -> None:
    rows = rows_of([row(1, 20), row(30, 30)], 4)
    kv_layer = random_kv(rows, 1, 64)
    kv_layer[0] = 100.0
    _check_close(torch.full((31, 4, 64), -100.0), kv_layer, rows)


def test_queries_may_be_a_slice_of_the_fused_projection() -> None:
    rows = rows_of(MIXED, 16)
    heads = torch.randn(int(rows.query_start[-1]), 4 + 2, 64)
    _check_close(heads[:, :4], random_kv(rows, 1, 64), rows)


def test_a_row_of_many_parts_gives_the_same_in_any_step() -> None:
    """Bit for bit: how a row is cut depends on its own lengths."""
    both = rows_of([row(1, 300), row(33, 1100), row(1, 40)], 16)
    kv_layer, q = random_kv(both, 1, 32), _queries(both, 4, 32)
    found = _run(q, kv_layer, both)
    for index in range(both.num_rows):
        tokens = slice(int(both.query_start[index]), int(both.query_start[index + 1]))
        alone = AttentionRows(
            np.array([0, tokens.stop - tokens.start], dtype=np.int32),
            both.seq_lens[index : index + 1],
            both.page_table,
            both.table_rows[index : index + 1],
            both.page_size,
        )
        assert torch.equal(_run(q[tokens], kv_layer, alone), found[tokens])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("step", ["mixed", "tree"])
def test_padding_changes_nothing_and_gets_zeros(step: str) -> None:
    rows = rows_of(STEPS[step], 16)
    kv_layer, q = random_kv(rows, 1, 64), _queries(rows, 4, 64)
    padded = torch.cat((q, torch.full((7, 4, 64), torch.nan)))
    found = _run(padded, kv_layer, rows, padded_tokens=len(padded))
    assert torch.equal(found[: len(q)], _run(q, kv_layer, rows))
    assert not found[len(q) :].count_nonzero()


@pytest.mark.parametrize("step", STEPS)
def test_what_a_light_plan_leaves_out_has_nothing_to_do(step: str) -> None:
    rows = rows_of(STEPS[step], 16)
    kv_layer, q = random_kv(rows, 1, 64), _queries(rows, 4, 64)
    q = torch.cat((q, q.new_zeros(30, 4, 64)))  # of a size that has room for wide tiles
    plan = triton_attention.plan_attention(rows, kv_layer, 4, padded_tokens=len(q))
    assert (plan.light is not None) == (step in ("decode", "long"))
    assert len(plan.arrays["wide_items"])
    if plan.light is not None:
        assert plan.light["wide_items"].shape == (0,)
        table = torch.from_numpy(rows.page_table)
        found, expected = (
            triton_attention.paged_attention(
                q, kv_layer, plan.bind({n: torch.from_numpy(a) for n, a in arrays.items()}, table)
            )
            for arrays in (plan.light, plan.arrays)
        )
        assert torch.equal(found, expected)


def test_a_bound_plan_serves_other_steps_through_its_arrays() -> None:
    """As a captured graph does: the arrays and the page table are overwritten, nothing else."""
    steps = [rows_of(STEPS[step], 16) for step in ("tree", "mixed", "decode")]
    table = np.zeros((8, 64), dtype=np.int32)
    kv_layer = torch.randn(2, 1, 1024, 64)
    copies: dict[str, torch.Tensor] = {}
    device_table = torch.from_numpy(table.copy())
    bound: object = None
    for rows in steps:
        rows = _with_table(rows, table)
        plan = triton_attention.plan_attention(rows, kv_layer, 4, DEFAULT_OPTIONS, 64)
        if bound is None:
            copies = {
                name: torch.empty(a.shape, dtype=torch.int32) for name, a in plan.arrays.items()
            }
            bound = plan.bind(copies, device_table)
        for name, array in plan.arrays.items():
            copies[name].copy_(torch.from_numpy(array))
        device_table.copy_(torch.from_numpy(rows.page_table))
        q = torch.randn(64, 4, 64)
        found = triton_attention.paged_attention(q, kv_layer, bound)
        num_tokens = int(rows.query_start[-1])
        expected = _reference(q[:num_tokens], kv_layer, rows)
        torch.testing.assert_close(found[:num_tokens], expected, atol=1e-5, rtol=1e-5)


def _check(
    rows: AttentionRows,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> None:
    kv_layer = random_kv(rows, num_kv_heads, head_dim).to(dtype)
    _check_close(_queries(rows, num_heads, head_dim).to(dtype), kv_layer, rows, options)


def _check_close(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    rows: AttentionRows,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> None:
    expected = _reference(q, kv_layer, rows, options)
    assert expected.isfinite().all()
    tolerance = TOLERANCE[q.dtype]
    found = _run(q, kv_layer, rows, options)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def _queries(rows: AttentionRows, num_heads: int, head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_heads)
    return torch.randn(int(rows.query_start[-1]), num_heads, head_dim, generator=generator)


def _run(
    q: torch.Tensor,
    kv_layer: KVLayer,
    rows: AttentionRows,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> torch.Tensor:
    plan = triton_attention.plan_attention(rows, kv_layer, q.shape[1], options, padded_tokens)
    copies = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
    bound = plan.bind(copies, torch.from_numpy(rows.page_table))
    return triton_attention.paged_attention(q, kv_layer, bound)


def _reference(
    q: torch.Tensor,
    kv_layer: KVLayer,
    rows: AttentionRows,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> torch.Tensor:
    plan = reference.plan_attention(rows, kv_layer, q.shape[1], options)
    return reference.paged_attention(q, kv_layer, plan)


def _with_table(rows: AttentionRows, table: np.ndarray) -> AttentionRows:
    """The same rows in a table of a fixed size."""
    wider = table.copy()
    wider[: len(rows.page_table), : rows.page_table.shape[1]] = rows.page_table
    return AttentionRows(
        rows.query_start, rows.seq_lens, wider, rows.table_rows, rows.page_size, rows.segments
    )
