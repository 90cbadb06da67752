"""Fast CPU kernels against the plain torch reference, over shapes, dtypes and edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.cpu import linear as cpu_linear
from stemma.kernels.cpu.paged_attention import plan_attention
from stemma.kernels.registry import select_kernels

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# Largest relative difference allowed: rounding of one or two operations at the values' size.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.02}
NUM_TOKENS = [1, 2, 31, 32, 33, 100]

pytestmark = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_the_reference(dtype: torch.dtype, num_tokens: int, has_bias: bool) -> None:
    x, weight = _randn(dtype, num_tokens, 48), _randn(dtype, 80, 48)
    bias = _randn(dtype, 80) if has_bias else None
    outputs = [kernels.make_linear(weight, bias)(x) for kernels in _both(dtype)]
    _assert_close(*outputs)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_rms_norm_equals_the_reference_and_adds_the_residual_in_place(
    dtype: torch.dtype, num_tokens: int, has_residual: bool
) -> None:
    x, weight, residual = (
        _randn(dtype, num_tokens, 64),
        _randn(dtype, 64),
        _randn(dtype, num_tokens, 64),
    )
    outputs, before = [], x.clone()
    for kernels in _both(dtype):
        total = residual.clone() if has_residual else None
        outputs.append(kernels.make_rms_norm(weight, 1e-5)(x, total))
        assert total is None or torch.equal(total, residual + x)
        assert torch.equal(x, before)
    _assert_close(*outputs)


def test_rms_norm_of_zeros_is_zero(dtype: torch.dtype) -> None:
    for kernels in _both(dtype):
        norm = kernels.make_rms_norm(torch.ones(8, dtype=dtype), 1e-6)
        assert torch.equal(norm(torch.zeros(2, 8, dtype=dtype)), torch.zeros(2, 8, dtype=dtype))


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rope_rotates_a_strided_view_in_place(dtype: torch.dtype, num_tokens: int) -> None:
    heads = _randn(dtype, num_tokens, 5, 16)
    angle = torch.arange(num_tokens)[:, None, None] * 0.3 + torch.arange(8) * 0.1
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    outputs = []
    for kernels in _both(dtype):
        rotated = heads.clone()
        kernels.apply_rope(rotated[:, :3], cos, sin)
        assert torch.equal(rotated[:, 3:], heads[:, 3:])
        outputs.append(rotated)
    _assert_close(*outputs)
    first, second = heads[:, :3, :8].double(), heads[:, :3, 8:].double()
    expected = torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )
    torch.testing.assert_close(outputs[0][:, :3].double(), expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_silu_and_mul_equals_the_reference(dtype: torch.dtype, num_tokens: int) -> None:
    gate_up = _randn(dtype, num_tokens, 2 * 24)
    _assert_close(*(kernels.silu_and_mul(gate_up) for kernels in _both(dtype)))


def test_store_kv_writes_the_slots_and_nothing_else(dtype: torch.dtype) -> None:
    heads = _randn(dtype, 4, 7, 8)  # 3 query heads, 2 key heads, 2 value heads
    kv = heads[:, 3:].view(4, 2, 2, 8)
    slots = torch.tensor([9, 0, 5, 2])
    for kernels in _both(dtype):
        kv_layer = torch.zeros(2, 2, 12, 8, dtype=dtype)
        kernels.store_kv(kv_layer, slots, kv)
        others = [1, 3, 4, 6, 7, 8, 10, 11]
        assert torch.equal(kv_layer[:, :, slots], kv.permute(1, 2, 0, 3))
        assert kv_layer[:, :, others].count_nonzero() == 0
        assert torch.equal(kv_layer[0, :, 9], heads[0, 3:5])
        assert torch.equal(kv_layer[1, :, 9], heads[0, 5:])


# (queries, keys) of each row, for a page size of 16.
ATTENTION_CASES = {
    "one token": [(1, 1)],
    "one row of many keys": [(1, 400)],
    "decode at page edges": [(1, 15), (1, 16), (1, 17), (1, 1), (1, 33)],
    "decode of equal lengths": [(1, 20)] * 3,
    "decode of very different lengths": [(1, 3), (1, 400), (1, 5), (1, 390), (1, 1)] + [(1, 2)] * 4,
    "prompts": [(15, 15), (16, 16), (17, 17)],
    "chunks": [(15, 16), (2, 17), (7, 100)],
    "prompts at query blocks": [(63, 63), (64, 64), (65, 65), (130, 150)],
    "mixed": [(1, 40), (9, 9), (1, 7), (5, 30), (1, 41), (33, 33)],
}


@pytest.mark.parametrize("case", ATTENTION_CASES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
def test_paged_attention_equals_dense_attention(
    dtype: torch.dtype, heads: tuple[int, int], page_size: int, case: str
) -> None:
    """Both backends against a dense computation in float64; unused slots hold NaN."""
    num_heads, num_kv_heads = heads
    rows, kv_layer, dense = _paged_rows(ATTENTION_CASES[case], page_size, num_kv_heads, dtype)
    num_tokens = int(rows.query_start[-1])
    q = _randn(dtype, num_tokens, num_heads + 3, 8)[:, :num_heads]
    expected = torch.empty(num_tokens, num_heads, 8, dtype=torch.float64)
    for row, kv in enumerate(dense):
        tokens = slice(int(rows.query_start[row]), int(rows.query_start[row + 1]))
        expected[tokens] = _dense_attention(q[tokens].double(), *kv.double())
    for kernels in _both(dtype):
        out = kernels.paged_attention(q, kv_layer, kernels.plan_attention(rows, kv_layer))
        assert out.dtype is dtype
        _assert_close(out, expected.to(dtype))


def test_decode_rows_are_grouped_by_length_only_where_padding_is_wasteful(
    dtype: torch.dtype,
) -> None:
    def num_groups(lens: list[int]) -> int:
        rows, kv_layer, _ = _paged_rows([(1, n) for n in lens], 1, 1, dtype)
        return len(plan_attention(rows, kv_layer).decode_groups)

    assert num_groups([100, 90, 110]) == 1
    assert num_groups([1000] * 3 + [10] * 3) == 2
    assert num_groups([300 + i % 40 for i in range(64)]) == 1


def test_packed_linear_is_refused_with_a_reason_where_it_does_not_work(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        raise RuntimeError("no such primitive\nmore lines")

    monkeypatch.setattr(cpu_linear, "make_linear", broken)
    cpu_linear.why_not_packed.cache_clear()
    try:
        linear = next(c for c in select_kernels(dtype).describe() if c.op == "linear")
        assert linear.implementation == "reference"
        assert "no such primitive" in linear.reason or "no packed linear" in linear.reason
    finally:
        cpu_linear.why_not_packed.cache_clear()


def test_registry_names_every_op_and_obeys_reference_mode(dtype: torch.dtype) -> None:
    forced = select_kernels(dtype, mode="reference").describe()
    assert {choice.implementation for choice in forced} == {"reference"}
    assert [choice.op for choice in forced] == [
        choice.op for choice in select_kernels(dtype).describe()
    ]
    assert all(choice.reason for choice in forced)


def _both(dtype: torch.dtype) -> tuple:  # type: ignore[type-arg]
    return select_kernels(dtype, mode="reference"), select_kernels(dtype)


def _randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    size = expected.double().abs().max().item()
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE[found.dtype] * size, (error, size)


def _paged_rows(
    sizes: list[tuple[int, int]], page_size: int, num_kv_heads: int, dtype: torch.dtype
) -> tuple[AttentionRows, torch.Tensor, list[torch.Tensor]]:
    """Rows over shuffled pages; slots of no row and garbage table entries point at NaN."""
    num_pages = [-(-keys // page_size) for _, keys in sizes]
    pages = np.random.default_rng(0).permutation(sum(num_pages) + 1)
    unused, taken = int(pages[-1]), 0
    table = np.full((len(sizes), max(num_pages) + 2), unused, dtype=np.int32)
    num_slots = (sum(num_pages) + 1) * page_size
    kv_layer = torch.full((2, num_kv_heads, num_slots, 8), torch.nan, dtype=dtype)
    dense = []
    for row, (_, keys) in enumerate(sizes):
        own = pages[taken : taken + num_pages[row]]
        table[row, : len(own)] = own
        taken += len(own)
        slots = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:keys]
        kv = _randn(dtype, 2, num_kv_heads, keys, 8)
        kv_layer[:, :, torch.from_numpy(slots)] = kv
        dense.append(kv)
    query_start = np.cumsum([0] + [queries for queries, _ in sizes]).astype(np.int32)
    seq_lens = np.array([keys for _, keys in sizes], dtype=np.int32)
    return AttentionRows(query_start, seq_lens, table, page_size), kv_layer, dense


def _dense_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Head by head, query by query, each over exactly the keys that it may see."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    out = torch.empty_like(q)
    for query in range(num_queries):
        visible = num_keys - num_queries + query + 1
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = keys[kv_head, :visible] @ q[query, head] / head_dim**0.5
            out[query, head] = scores.softmax(0) @ values[kv_head, :visible]
    return out
