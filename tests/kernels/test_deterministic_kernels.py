"""Deterministic kernels: a row gets the same bits in any step.

Rows in steps of random rows, in random order, are compared with each row alone, and with the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from attention_trees import random_kv
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.model_options import AttentionOptions, RoutingOptions
from stemma.kernels.native.bindings import why_not_native
from stemma.kernels.ops import KVLayer
from stemma.kernels.quantized_tensors import QuantizedKV, QuantizedWeight
from stemma.kernels.reference.kv_store import quantized
from stemma.kernels.registry import select_kernels

pytestmark = pytest.mark.skipif(
    why_not_native(torch.bfloat16) is not None, reason=str(why_not_native(torch.bfloat16))
)

DTYPES = (torch.bfloat16, torch.float32)
# Of results of about 1, against the reference in the same dtype.
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 2e-5}
NUM_ROWS, NUM_INPUTS, VOCAB = 41, 96, 260
RowOp = Callable[[torch.Tensor], torch.Tensor]  # [T, NUM_INPUTS] -> [T, any]

subsets = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=70).map(tuple)


def _randn(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _weight(bits: int, activations: str, dtype: torch.dtype) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits)
    width = NUM_INPUTS // (1 if bits == 8 else 2)
    low, high, kind = (-127, 128, torch.int8) if bits == 8 else (0, 256, torch.uint8)
    values = torch.randint(low, high, (80, width), generator=generator).to(kind)
    group = NUM_INPUTS if bits == 8 else 32
    scales = torch.rand(80, NUM_INPUTS // group, generator=generator).to(dtype) / 100
    return QuantizedWeight(bits, group, values, scales, None, activations)  # type: ignore[arg-type]


def _row_ops(dtype: torch.dtype) -> dict[str, RowOp]:
    k = select_kernels(dtype, mode="deterministic")
    weight, bias = _randn(dtype, 80, NUM_INPUTS, seed=1) / 10, _randn(dtype, 80, seed=2)
    heads = _randn(dtype, 6, 16, 24, seed=3)
    experts = k.make_experts(
        _randn(dtype, 5, 64, NUM_INPUTS, seed=4) / 10, _randn(dtype, 5, NUM_INPUTS, 32) / 10, "silu"
    )
    options = RoutingOptions(2, scoring="sigmoid", is_normalized=True)
    norm = k.make_rms_norm(_randn(dtype, NUM_INPUTS, seed=5), 1e-5)
    output = k.make_output_linear(_randn(dtype, VOCAB, NUM_INPUTS, seed=6))
    router = k.make_output_linear(_randn(dtype, 5, NUM_INPUTS, seed=7))

    def mixture(x: torch.Tensor) -> torch.Tensor:
        return experts(x, *k.route_experts(router(x), None, options))

    def logprobs(x: torch.Tensor) -> torch.Tensor:
        logits = output(x)
        return k.token_logprobs(logits, logits.argmax(-1))[:, None]

    ops: dict[str, RowOp] = {
        "linear": k.make_linear(weight, bias),
        "logits": output,
        "norm": norm,
        "normed residual": lambda x: norm(x, x.flip(-1).contiguous()),
        "heads": lambda x: k.make_head_linear(heads)(x.view(-1, 6, 16)).flatten(1),
        "experts": mixture,
        "logprobs": logprobs,
    }
    for activation in ("silu", "gelu", "gelu_tanh"):
        ops[activation] = k.make_gated_linear(weight, bias, activation)
    if dtype is torch.bfloat16:
        for name, bits, activations in (
            ("w8", 8, "exact"),
            ("w8a8", 8, "int8"),
            ("w4", 4, "exact"),
        ):
            ops[name] = k.make_linear(_weight(bits, activations, dtype), bias)
        ops["adapters"] = _with_adapters(dtype, weight)
    return ops


def _with_adapters(dtype: torch.dtype, weight: torch.Tensor) -> RowOp:
    """Rows' adapters follow from their numbers, so that they go along with any order."""
    k = select_kernels(dtype, mode="deterministic")
    run = k.make_linear(weight, None)
    lora = k.make_lora(_randn(dtype, 3, 8, NUM_INPUTS), _randn(dtype, 3, 80, 8), [80])

    def op(x: torch.Tensor) -> torch.Tensor:
        slots = (x[:, 0].float().abs() * 10).int().numpy() % 4
        y = run(x)
        lora(x, y, k.plan_lora(slots.astype(np.int32), 3))
        return y

    return op


@pytest.fixture(scope="module")
def row_ops() -> dict[torch.dtype, dict[str, RowOp]]:
    return {dtype: _row_ops(dtype) for dtype in DTYPES}


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(DTYPES), subsets)
@example(torch.bfloat16, tuple(range(NUM_ROWS)) * 3)  # so many share weights as floats
def test_ops_on_rows_give_the_same_bits_in_any_step(
    row_ops: dict[torch.dtype, dict[str, RowOp]], dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    x = _randn(dtype, NUM_ROWS, NUM_INPUTS, seed=9)
    for name, op in row_ops[dtype].items():
        found = op(x[list(rows)])
        expected = torch.cat([op(x[row : row + 1].clone()) for row in rows])
        assert torch.equal(found, expected), name


OPTIONS = {
    "plain": AttentionOptions(),
    "soft cap": AttentionOptions(soft_cap=5.0),
    "window": AttentionOptions(window=70),
    "chunks": AttentionOptions(chunk=70),
    "short window": AttentionOptions(window=3),
    "sinks": AttentionOptions(window=70, num_sink_tokens=5),
}
# (number of tokens with KV, how many of them are queries): whole prompts, chunks, decode.
steps = st.lists(
    st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["bfloat16", "float32", "int8", "fp8", "int4"])
@settings(max_examples=8, deadline=None)
@given(steps, st.sampled_from([1, 4]))
def test_attention_gives_the_same_bits_in_any_step(
    name: str, kind: str, shapes: list[tuple[int, int]], page_size: int
) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    rows = _rows(shapes, page_size)
    kv_layer = _kv_of(random_kv(rows, 2, 32), kind)
    q = _randn(dtype, int(rows.query_start[-1]), 6, 32) * 2
    found = _attend(q, kv_layer, rows, OPTIONS[name], "deterministic")
    expected = _attend(q, kv_layer, rows, OPTIONS[name], "reference")
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for row in range(rows.num_rows):
        first, last = rows.query_start[row : row + 2].tolist()
        for token in {first, (first + last) // 2, last - 1}:
            one = _one_query(rows, row, token)
            assert torch.equal(
                _attend(q[token : token + 1], kv_layer, one, OPTIONS[name], "deterministic"),
                found[token : token + 1],
            ), (row, token)


def test_latent_attention_gives_the_same_bits_in_any_step() -> None:
    rows = _rows([(150, 90), (65, 1), (64, 64)], 4)
    for dtype in DTYPES:
        num_slots = (int(rows.page_table.max()) + 1) * 4
        kv_layer = _randn(dtype, num_slots, 48)
        q = _randn(dtype, int(rows.query_start[-1]), 6, 48, seed=1)

        def attend(
            q: torch.Tensor, rows: AttentionRows, mode: str, kv_layer: torch.Tensor = kv_layer
        ) -> torch.Tensor:
            k = select_kernels(q.dtype, mode=mode)  # type: ignore[arg-type]
            plan = k.plan_latent_attention(rows, kv_layer, 6, 0.2)
            return k.latent_attention(q[..., :32], q[..., 32:], kv_layer, plan)

        found = attend(q, rows, "deterministic")
        expected = attend(q, rows, "reference")
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for row, token in ((0, 0), (0, 70), (1, 90), (2, 100)):
            alone = attend(q[token : token + 1], _one_query(rows, row, token), "deterministic")
            assert torch.equal(alone, found[token : token + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linears_equal_the_reference(dtype: torch.dtype) -> None:
    x, weight = _randn(dtype, 13, NUM_INPUTS), _randn(dtype, 80, NUM_INPUTS, seed=1) / 10
    mine, theirs = (select_kernels(dtype, mode=mode) for mode in ("deterministic", "reference"))
    for activation in ("silu", "gelu", "gelu_tanh"):
        torch.testing.assert_close(
            mine.make_gated_linear(weight, None, activation)(x),
            theirs.make_gated_linear(weight, None, activation)(x),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )


def _rows(shapes: Sequence[tuple[int, int]], page_size: int) -> AttentionRows:
    """Rows over pages of their own, in no order."""
    lens = np.array([length for length, _ in shapes], dtype=np.int32)
    num_pages = -(-lens // page_size)
    pages = np.random.default_rng(len(shapes)).permutation(int(num_pages.sum())).astype(np.int32)
    table = np.full((len(shapes), int(num_pages.max())), len(pages), dtype=np.int32)
    for row, (last, count) in enumerate(zip(np.cumsum(num_pages).tolist(), num_pages.tolist())):
        table[row, :count] = pages[last - count : last]
    starts = np.cumsum([0] + [queries for _, queries in shapes]).astype(np.int32)
    return AttentionRows(starts, lens, table, np.arange(len(shapes), dtype=np.int32), page_size)


def _one_query(rows: AttentionRows, row: int, token: int) -> AttentionRows:
    """The step that computes one token of a row, after those before it."""
    seq_len = rows.seq_lens[row] - (rows.query_start[row + 1] - 1 - token)
    return AttentionRows(
        np.array([0, 1], dtype=np.int32),
        np.array([seq_len], dtype=np.int32),
        rows.page_table,
        rows.table_rows[row : row + 1],
        rows.page_size,
    )


def _kv_of(kv: torch.Tensor, kind: str) -> KVLayer:
    if kind in ("bfloat16", "float32"):
        return kv.to(getattr(torch, kind))
    formats = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
    return QuantizedKV(*quantized(kv, formats[kind]))


def _attend(
    q: torch.Tensor, kv_layer: KVLayer, rows: AttentionRows, options: AttentionOptions, mode: str
) -> torch.Tensor:
    k = select_kernels(q.dtype, mode=mode)  # type: ignore[arg-type]
    return k.paged_attention(q, kv_layer, k.plan_attention(rows, kv_layer, q.shape[1], options))
