"""A CPU's attention with windows, sinks, soft caps and quantized KV, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from attention_trees import Branch, branches, quantized, random_kv, row, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.kv_cache_dtype import INT4_STEP
from stemma.kernels.model_options import DEFAULT_OPTIONS, AttentionOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import KVLayer
from stemma.kernels.registry import KernelMode, select_kernels
from stemma.kernels.visible_keys import visible_keys

TREE = [
    Branch(
        2, (Branch(3, (Branch(1), Branch(1, (), 3, 9))), Branch(1, (), 1, 30), Branch(1, (), 5))
    ),
    row(1, 20),
]
MIXED = [row(1, 33), row(40, 70), row(2, 50), row(130, 200), row(1, 1), row(9, 9)]
LONG = [row(1, 2100)]  # in parts
OPTIONS = {
    "plain": DEFAULT_OPTIONS,
    "window": AttentionOptions(window=20),
    "window of a block": AttentionOptions(window=64),
    "window of one": AttentionOptions(window=1),
    "window past the end": AttentionOptions(window=5000),
    "sinks": AttentionOptions(window=12, num_sink_tokens=3),
    "more sinks than window": AttentionOptions(window=4, num_sink_tokens=30),
    "cap": AttentionOptions(soft_cap=2.0),
    "scale": AttentionOptions(scale=0.3),
    "chunks": AttentionOptions(chunk=9),
    "chunks of pages": AttentionOptions(chunk=32, soft_cap=3.0),
    "a chunk for all": AttentionOptions(chunk=5000),
    "all": AttentionOptions(scale=0.2, window=40, num_sink_tokens=2, soft_cap=3.0),
}
KINDS: dict[str, torch.dtype | None] = {
    "bf16": None,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
# (mode, dtype, tolerance): torch calls in two precisions, and what is compiled where it is.
PATHS: dict[str, tuple[KernelMode, torch.dtype, float]] = {
    "cpu float64": ("cpu", torch.float64, 1e-6),
    "cpu bfloat16": ("cpu", torch.bfloat16, 0.03),
    "native": ("auto", torch.bfloat16, 0.012),
}


@pytest.mark.parametrize("path", ["cpu float64", "native"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_and_shared_rows(options: AttentionOptions, kind: str, path: str) -> None:
    for page_size, forest in ((16, MIXED), (1, TREE)):
        _check(rows_of(forest, page_size), options, kind, path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 16), (4, 2, 64), (7, 1, 80), (2, 2, 128), (4, 2, 256), (3, 3, 24)],
)
def test_heads_of_any_shape(num_heads: int, num_kv_heads: int, head_dim: int, path: str) -> None:
    """24 is no multiple of 16: what is compiled leaves it to torch calls."""
    rows = rows_of([row(1, 40), row(20, 90)], 4)
    for kind in KINDS:
        for options in (DEFAULT_OPTIONS, OPTIONS["all"]):
            _check(rows, options, kind, path, num_heads, num_kv_heads, head_dim)


@pytest.mark.parametrize("kind", KINDS)
def test_few_and_more_query_heads_a_kv_head(kind: str) -> None:
    """Lone tokens over several blocks of keys, whole and cut by a window."""
    rows = rows_of([row(1, 203), row(1, 64), row(1, 130), row(3, 90)], 16)
    for group in range(1, 6):
        for options in (DEFAULT_OPTIONS, OPTIONS["all"], AttentionOptions(window=100)):
            _check(rows, options, kind, "native", 2 * group, 2, 96 if group == 1 else 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [DEFAULT_OPTIONS, AttentionOptions(window=1500)], ids=str)
def test_a_long_row_in_parts(options: AttentionOptions, kind: str) -> None:
    _check(rows_of(LONG, 16), options, kind, "native")


@settings(max_examples=40, deadline=None)
@given(
    forest=st.lists(branches, min_size=1, max_size=3),
    page_size=st.sampled_from([1, 16]),
    window=st.integers(1, 120),
    num_sinks=st.sampled_from([0, 0, 1, 20]),
    min_rows=st.sampled_from([1, 2]),
)
def test_any_tree_under_any_window(
    forest: list[Branch], page_size: int, window: int, num_sinks: int, min_rows: int
) -> None:
    rows = rows_of(forest, page_size, min_rows)
    options = AttentionOptions(window=window, num_sink_tokens=num_sinks)
    for path in ("cpu float64", "native"):
        _check(rows, options, "bf16", path, head_dim=16)


@settings(max_examples=100, deadline=None)
@given(
    forest=st.lists(branches, min_size=1, max_size=3),
    window=st.integers(1, 60),
    num_sinks=st.sampled_from([0, 1, 9]),
)
def test_a_rows_runs_are_what_its_queries_see(
    forest: list[Branch], window: int, num_sinks: int
) -> None:
    """Nothing that a query sees is missing, and nothing before all windows is read but sinks."""
    rows = rows_of(forest, 4, 1)
    options = AttentionOptions(window=window, num_sink_tokens=num_sinks)
    keys = visible_keys(rows, options)
    for index, (length, num_queries) in enumerate(
        zip(rows.seq_lens.tolist(), rows.num_queries.tolist(), strict=True)
    ):
        first = length - num_queries + 1 - window  # that the first query sees
        seen = {k for k in range(length) if k >= first or k < num_sinks}
        shared = {
            token
            for start, end, row_start, row_end in keys.segments.tolist()
            for token in range(start, end)
            if row_start <= index < row_end
        }
        runs = [
            set(range(int(keys.num_sinks[index]))),
            set(range(int(keys.first[index]), int(keys.shared_start[index]))),
            shared,
            set(range(int(keys.own_start[index]), length)),
        ]
        assert set().union(*runs) == seen and sum(map(len, runs)) == len(seen)
        assert all(token > length - 1 - window for token in shared), "all queries see it whole"


def test_keys_before_every_window_are_not_read() -> None:
    """Not even to be multiplied by zero: they may be NaN."""
    rows = rows_of([row(1, 300), row(70, 300)], 1)
    options = AttentionOptions(window=30, num_sink_tokens=2)
    kv_layer = random_kv(rows, 2, 16)
    for index, first in ((0, 270), (1, 201)):
        kv_layer[:, :, torch.from_numpy(rows.slots(index, 2, first))] = torch.nan
    for mode, dtype in (("cpu", torch.float32), ("auto", torch.bfloat16)):
        q, kv = _queries(rows, 4, 16).to(dtype), kv_layer.to(dtype)
        kernels = select_kernels(dtype, mode=mode)  # type: ignore[arg-type]
        plan = kernels.plan_attention(rows, kv, 4, options)
        assert kernels.paged_attention(q, kv, plan).isfinite().all()


@pytest.mark.skipif(why_not_native(torch.bfloat16) is not None, reason="nothing is compiled here")
def test_a_compiled_soft_cap_is_right_for_small_and_large_scores() -> None:
    """A key of score s beside one of score 0, with the values 1 and 0: 1 / (1 + e^-capped)."""
    rows = rows_of([row(1, 2)], 1)
    slot = int(rows.slots(0, 1, 2)[0])
    kernels = select_kernels(torch.bfloat16)
    options = AttentionOptions(scale=1 / 16, soft_cap=5.0)
    for score in [sign * 4.0**power for power in range(-8, 8) for sign in (-1, 1)]:
        kv_layer = torch.zeros(2, 1, int(rows.page_table.max()) + 1, 16).bfloat16()
        kv_layer[0, 0, slot], kv_layer[1, 0, slot] = score, 1.0
        plan = kernels.plan_attention(rows, kv_layer, 1, options)
        found = kernels.paged_attention(torch.ones(1, 1, 16).bfloat16(), kv_layer, plan)
        expected = 1 / (1 + math.exp(-5 * math.tanh(score / 5)))
        assert found[0, 0, 0].item() == pytest.approx(expected, rel=3 * 2**-9)


def _check(
    rows: AttentionRows,
    options: AttentionOptions,
    kind: str,
    path: str,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
) -> None:
    """Against the reference in float64 over the same numbers."""
    if kind == "int4" and head_dim % INT4_STEP:
        return  # refused
    mode, dtype, tolerance = PATHS["cpu bfloat16" if path == "native" and head_dim % 16 else path]
    kv_layer = _kv(random_kv(rows, num_kv_heads, head_dim), kind, dtype)
    q = (_queries(rows, num_heads, head_dim) * 2).to(dtype)
    fast, truth = select_kernels(dtype, mode=mode), select_kernels(torch.float64, mode="reference")
    found = fast.paged_attention(
        q, kv_layer, fast.plan_attention(rows, kv_layer, num_heads, options)
    )
    plan = truth.plan_attention(rows, kv_layer, num_heads, options)
    wide = kv_layer.double() if isinstance(kv_layer, Tensor) else kv_layer
    expected = truth.paged_attention(q.double(), wide, plan)
    assert found.dtype is dtype and found.shape == q.shape
    error = (found.double() - expected).abs().max().item()
    assert error <= tolerance * max(1.0, expected.abs().max().item()), error


def _kv(kv_layer: Tensor, kind: str, dtype: torch.dtype) -> KVLayer:
    format_dtype = KINDS[kind]
    return kv_layer.to(dtype) if format_dtype is None else quantized(kv_layer, format_dtype)


def _queries(rows: AttentionRows, num_heads: int, head_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(int(rows.query_start[-1]), num_heads, head_dim, generator=generator)
