"""Sinks that are learned logits: each counts once, however a row's keys are split and merged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from attention_trees import Branch, branches, quantized, random_kv, row, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import KVLayer
from stemma.kernels.registry import KernelMode, select_kernels
from stemma.kernels.triton import paged_attention as triton_attention

TREE = [
    Branch(
        2, (Branch(3, (Branch(1), Branch(1, (), 3, 9))), Branch(1, (), 1, 30), Branch(1, (), 5))
    ),
    row(1, 20),
]
STEPS = {
    "decode": [row(1, 1), row(1, 15), row(1, 65)],
    "mixed": [row(1, 33), row(40, 70), row(2, 50), row(9, 9)],
    "parts": [row(1, 2100)],
    "tree": TREE,
    "long segment": [Branch(90, (Branch(1), Branch(1, (), 40, 60), Branch(1, (), 2, 7)))],
}
OPTIONS = {
    "plain": DEFAULT_OPTIONS,
    "window": AttentionOptions(window=20),
    "window past the end": AttentionOptions(window=5000),
    "scale, window and sink tokens": AttentionOptions(scale=0.3, window=12, num_sink_tokens=3),
    "cap": AttentionOptions(soft_cap=2.0, scale=0.2),
}


def _triton(
    q: Tensor, kv_layer: KVLayer, rows: AttentionRows, options: AttentionOptions, sinks: Tensor
) -> Tensor:
    plan = triton_attention.plan_attention(rows, kv_layer, q.shape[1], options)
    copies = {name: torch.from_numpy(array.copy()) for name, array in plan.arrays.items()}
    bound = plan.bind(copies, torch.from_numpy(rows.page_table))
    return triton_attention.paged_attention(q, kv_layer, bound, sinks)


def _mode(mode: KernelMode) -> Callable[..., Tensor]:
    def run(
        q: Tensor, kv_layer: KVLayer, rows: AttentionRows, options: AttentionOptions, sinks: Tensor
    ) -> Tensor:
        k = select_kernels(q.dtype, mode=mode)
        plan = k.plan_attention(rows, kv_layer, q.shape[1], options)
        return k.paged_attention(q, kv_layer, plan, sinks)

    return run


needs_native = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason="nothing is compiled here"
)
# (run, dtype, tolerance)
PATHS = {
    "cpu float64": (_mode("cpu"), torch.float64, 1e-12),
    "cpu bfloat16": (_mode("cpu"), torch.bfloat16, 0.03),
    "native": (_mode("auto"), torch.bfloat16, 0.012),
    "deterministic bfloat16": (_mode("deterministic"), torch.bfloat16, 0.012),
    "deterministic float32": (_mode("deterministic"), torch.float32, 1e-5),
    "triton float32": (_triton, torch.float32, 1e-5),
    "triton float16": (_triton, torch.float16, 4e-3),
}
COMPILED = ("native", "deterministic bfloat16", "deterministic float32")
paths = pytest.mark.parametrize(
    "path", [pytest.param(p, marks=needs_native if p in COMPILED else ()) for p in PATHS]
)


@paths
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", STEPS)
def test_a_sink_counts_once_in_any_step(step: str, options: str, path: str) -> None:
    if path.startswith("triton") and (step == "parts" or options == "window past the end"):
        pytest.skip("slow in the interpreter; other steps have parts too")
    slow = path == "triton float16" or options != "plain"
    if path.startswith("triton") and step == "long segment" and slow:
        pytest.skip("slow in the interpreter; other steps have these options, and this one float32")
    for page_size in (16,) if path.startswith("triton") else (1, 16):
        _check(rows_of(STEPS[step], page_size, 1), OPTIONS[options], path)


@pytest.mark.parametrize("path", ["cpu float64", pytest.param("native", marks=needs_native)])
@settings(max_examples=25, deadline=None)
@given(
    forest=st.lists(branches, min_size=1, max_size=3),
    window=st.one_of(st.none(), st.integers(1, 120)),
    num_sinks=st.sampled_from([0, 5]),
)
def test_a_sink_counts_once_in_any_tree(
    path: str, forest: list[Branch], window: int | None, num_sinks: int
) -> None:
    options = AttentionOptions(window=window, num_sink_tokens=num_sinks)
    _check(rows_of(forest, 4, 1), options, path, head_dim=16)


def test_triton_parts_of_a_long_row() -> None:
    _check(rows_of([row(1, 300), row(33, 400)], 16), DEFAULT_OPTIONS, "triton float32")


@pytest.mark.parametrize(
    "kind", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=["int8", "fp8", "int4"]
)
@pytest.mark.parametrize(
    "path", ["cpu float64", pytest.param("native", marks=needs_native), "triton float16"]
)
def test_sinks_beside_quantized_kv(kind: torch.dtype, path: str) -> None:
    if kind is torch.uint8 and path.startswith("triton"):
        pytest.skip("4 bits are a CPU's")
    for step in ("mixed", "tree"):
        _check(rows_of(STEPS[step], 4, 1), OPTIONS["window"], path, kind=kind)


@paths
def test_heads_that_no_vector_holds(path: str) -> None:
    """24 is no multiple of 16, which the compiled kernels leave to torch calls."""
    if path.startswith("deterministic"):
        pytest.skip("refuses such heads")
    _check(rows_of(TREE, 4, 1), DEFAULT_OPTIONS, path, num_heads=6, num_kv_heads=3, head_dim=24)


@paths
@pytest.mark.parametrize("sink", [-300.0, 0.0, 300.0])
def test_sinks_far_above_and_below_all_scores(path: str, sink: float) -> None:
    """Nothing overflows: a sink far below changes nothing, one far above leaves nothing."""
    rows = rows_of(TREE, 4, 1)
    _check(rows, DEFAULT_OPTIONS, path, sinks=torch.full((6,), sink))


def test_the_reference_is_the_formula() -> None:
    """One key of score s and value 1: e^s / (e^s + e^sink)."""
    rows = rows_of([row(1, 1)], 1)
    kernels = select_kernels(torch.float64, mode="reference")
    kv_layer = torch.ones(2, 1, int(rows.page_table.max()) + 1, 2, dtype=torch.float64)
    q = torch.tensor([[[0.5, 1.0], [2.0, -3.0]]], dtype=torch.float64)
    options = AttentionOptions(scale=0.7)
    sinks = torch.tensor([0.3, -2.0], dtype=torch.float64)
    plan = kernels.plan_attention(rows, kv_layer, 2, options)
    found = kernels.paged_attention(q, kv_layer, plan, sinks)
    expected = [
        1 / (1 + math.exp(sink - score * 0.7)) for sink, score in ((0.3, 1.5), (-2.0, -1.0))
    ]
    assert found[0, :, 0].tolist() == pytest.approx(expected, rel=1e-12)


@needs_native
def test_bits_do_not_depend_on_neighbours_in_deterministic_runs() -> None:
    both = rows_of([row(1, 300), row(70, 300), row(1, 40)], 16)
    kv_layer, options = random_kv(both, 2, 32).bfloat16(), AttentionOptions(window=100)
    q, sinks = _queries(both, 6, 32).bfloat16(), _sinks(6)
    found = _mode("deterministic")(q, kv_layer, both, options, sinks)
    for index in range(both.num_rows):
        tokens = slice(int(both.query_start[index]), int(both.query_start[index + 1]))
        alone = AttentionRows(
            both.query_start[:2] * 0 + [0, tokens.stop - tokens.start],
            both.seq_lens[index : index + 1],
            both.page_table,
            both.table_rows[index : index + 1],
            both.page_size,
        )
        own = _mode("deterministic")(q[tokens].contiguous(), kv_layer, alone, options, sinks)
        assert torch.equal(own, found[tokens])


def _check(
    rows: AttentionRows,
    options: AttentionOptions,
    path: str,
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    sinks: Tensor | None = None,
    kind: torch.dtype | None = None,
) -> None:
    """Against the reference in float64 over the same numbers."""
    run, dtype, tolerance = PATHS["cpu bfloat16" if path == "native" and head_dim % 16 else path]
    sinks = _sinks(num_heads) if sinks is None else sinks
    kv = random_kv(rows, num_kv_heads, head_dim)
    kv_layer: KVLayer = kv.to(dtype) if kind is None else quantized(kv, kind)
    q = (_queries(rows, num_heads, head_dim) * 2).to(dtype)
    own = sinks.double() if dtype is torch.float64 else sinks.float()
    found = run(q, kv_layer, rows, options, own)
    truth = select_kernels(torch.float64, mode="reference")
    plan = truth.plan_attention(rows, kv_layer, num_heads, options)
    wide = kv_layer.double() if isinstance(kv_layer, Tensor) else kv_layer
    expected = truth.paged_attention(q.double(), wide, plan, own.double())
    assert found.dtype is dtype and found.isfinite().all()
    allowed = max(tolerance, 1e-6) if kind is not None else tolerance
    error = (found.double() - expected).abs().max().item()
    assert error <= allowed * max(1.0, expected.abs().max().item()), error


def _sinks(num_heads: int) -> Tensor:
    return torch.randn(num_heads, generator=torch.Generator().manual_seed(8)) * 2 + 1


def _queries(rows: AttentionRows, num_heads: int, head_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(int(rows.query_start[-1]), num_heads, head_dim, generator=generator)
