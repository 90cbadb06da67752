"""Fast CPU kernels against the plain torch reference, over shapes, dtypes and edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.cpu import linear as cpu_linear
from stemma.kernels.cpu.paged_attention import plan_attention
from stemma.kernels.registry import Kernels, select_kernels

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
    expected, *found = [kernels.make_linear(weight, bias)(x) for kernels in _all(dtype)]
    for out in found:
        _assert_close(out, expected)


@pytest.mark.parametrize("num_inputs", [7, 46])
def test_linear_of_odd_shapes_equals_the_reference(dtype: torch.dtype, num_inputs: int) -> None:
    x, weight = _randn(dtype, 13, num_inputs), _randn(dtype, 33, num_inputs)
    expected, *found = [kernels.make_linear(weight, None)(x) for kernels in _all(dtype)]
    for out in found:
        _assert_close(out, expected)


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
    for kernels in _all(dtype):
        total = residual.clone() if has_residual else None
        outputs.append(kernels.make_rms_norm(weight, 1e-5)(x, total))
        assert total is None or torch.equal(total, residual + x)
        assert torch.equal(x, before)
    for out in outputs[1:]:
        _assert_close(out, outputs[0])


def test_rms_norm_of_zeros_is_zero(dtype: torch.dtype) -> None:
    for kernels in _all(dtype):
        norm = kernels.make_rms_norm(torch.ones(8, dtype=dtype), 1e-6)
        assert torch.equal(norm(torch.zeros(2, 8, dtype=dtype)), torch.zeros(2, 8, dtype=dtype))


def test_rms_norm_by_a_float32_weight_rounds_its_result_only(dtype: torch.dtype) -> None:
    x = _randn(dtype, 5, 64)
    weight = 1 + _randn(torch.float32, 64) / 100  # which bfloat16 would round to 1 + n / 128
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    nearest = (exact.to(dtype).double() - exact).abs().max()
    for kernels in _all(dtype):
        out = kernels.make_rms_norm(weight.to(torch.promote_types(dtype, weight.dtype)), 1e-5)(x)
        assert out.dtype is dtype
        assert (out.double() - exact).abs().max() <= nearest + 1e-5


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("head_dim", [8, 80])
def test_query_key_norm_norms_heads_alone_or_together_and_leaves_values(
    dtype: torch.dtype, num_tokens: int, is_whole: bool, head_dim: int
) -> None:
    num_heads, num_kv_heads = 4, 2
    heads = _randn(dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim) if is_whole else (head_dim, head_dim)
    weights = [_randn(dtype, size) for size in sizes]
    expected, first = [], 0
    for weight, num in zip(weights, (num_heads, num_kv_heads)):
        norm = select_kernels(dtype, mode="reference").make_rms_norm(weight, 1e-5)
        part = heads[:, first : first + num]
        expected.append(norm(part.reshape(-1, len(weight))).view(part.shape))
        first += num
    for kernels in _all(dtype):
        found = heads.clone()
        kernels.make_query_key_norm(*weights, num_heads, num_kv_heads, 1e-5)(found)
        _assert_close(found[:, :first], torch.cat(expected, 1))
        assert torch.equal(found[:, first:], heads[:, first:])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_scaling_and_adding_in_place_round_once(dtype: torch.dtype, num_tokens: int) -> None:
    x, total = _randn(dtype, num_tokens, 50), _randn(dtype, num_tokens, 50) * 3
    for kernels in _all(dtype):
        scaled, added = x.clone(), total.clone()
        kernels.scale_in_place(scaled, 0.22)
        kernels.add_in_place(added, x)
        assert torch.equal(scaled, x * 0.22) and torch.equal(added, total + x)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("sizes", [(64, 64), (50, 3), (1, 40)])
def test_columns_are_joined_row_by_row(
    dtype: torch.dtype, num_tokens: int, sizes: tuple[int, int]
) -> None:
    first, second = (_randn(dtype, num_tokens, size) for size in sizes)
    for kernels in _all(dtype):
        joined = kernels.join_columns(first, second)
        assert torch.equal(joined, torch.cat([first, second], dim=-1)) and joined.is_contiguous()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_rows_of_a_share_are_gathered_and_others_are_zero(
    dtype: torch.dtype, num_tokens: int
) -> None:
    table = _randn(dtype, 40, 50)
    index = torch.arange(num_tokens) * 7 % 40
    expected = table[index].clone()
    expected[(index < 11) | (index >= 31)] = 0.0
    for kernels in _all(dtype):
        assert torch.equal(kernels.gather_share(table[11:31].contiguous(), index, 11), expected)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("head_dim", [8, 16, 80])
def test_rotate_and_store_rotates_queries_in_place_and_writes_kv_to_its_slots(
    dtype: torch.dtype, num_tokens: int, head_dim: int
) -> None:
    num_heads, num_kv_heads, half = 3, 2, head_dim // 2
    heads = _randn(dtype, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    angle = torch.arange(num_tokens)[:, None, None] * 0.3 + torch.arange(half) * 0.1
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    slots = torch.randperm(num_tokens + 3)[:num_tokens]
    unused = sorted(set(range(num_tokens + 3)) - set(slots.tolist()))
    found = []
    for kernels in _all(dtype):
        rotated = heads.clone()
        kv_layer = torch.zeros(2, num_kv_heads, num_tokens + 3, head_dim, dtype=dtype)
        kernels.rotate_and_store(rotated, cos, sin, kv_layer, slots)
        assert kv_layer[:, :, unused].count_nonzero() == 0
        values = kv_layer[1][:, slots].transpose(0, 1)
        assert torch.equal(values, heads[:, num_heads + num_kv_heads :])
        keys = kv_layer[0][:, slots].transpose(0, 1)
        found.append(torch.cat((rotated[:, :num_heads], keys), 1))
    first, second = heads[:, : num_heads + num_kv_heads].double().split(half, -1)
    expected = torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )
    for rotated in found:
        torch.testing.assert_close(rotated.double(), expected, atol=0.05, rtol=0)
        _assert_close(rotated, found[0])


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("size", "has_bias"), [(24, False), (16, True), (40, True)])
def test_gated_linear_equals_the_reference(
    dtype: torch.dtype, num_tokens: int, size: int, has_bias: bool
) -> None:
    x, weight = _randn(dtype, num_tokens, 48), _randn(dtype, 2 * size, 48) / 4
    bias = _randn(dtype, 2 * size) if has_bias else None
    expected, *found = [k.make_gated_linear(weight, bias)(x) for k in _all(dtype)]
    for out in found:
        _assert_close(out, expected)


def test_gated_linear_survives_huge_gates(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1e4, 0.0], [-1e4, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=dtype)
    for kernels in _all(dtype):
        out = kernels.make_gated_linear(weight, None)(torch.ones(1, 2, dtype=dtype))
        assert out[0, 1] == 0
        assert out[0, 0].item() == pytest.approx(1e4, rel=0.01)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_output_linear_is_wide(dtype: torch.dtype, num_tokens: int) -> None:
    x, weight = _randn(dtype, num_tokens, 48), _randn(dtype, 80, 48)
    exact = x.double() @ weight.double().T
    for kernels in _all(dtype):
        out = kernels.make_output_linear(weight)(x)
        assert out.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        error = (out.double() - exact).abs().max().item()
        assert error <= TOLERANCE[dtype] * exact.abs().max().item()


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
@pytest.mark.parametrize("heads", [(4, 4, 8), (6, 2, 16), (4, 1, 80)])
def test_paged_attention_equals_dense_attention(
    dtype: torch.dtype, heads: tuple[int, int, int], page_size: int, case: str
) -> None:
    """All backends against a dense computation in float64; unused slots hold NaN."""
    num_heads, num_kv_heads, head_dim = heads
    rows, kv_layer, dense = _paged_rows(
        ATTENTION_CASES[case], page_size, num_kv_heads, head_dim, dtype
    )
    num_tokens = int(rows.query_start[-1])
    q = _randn(dtype, num_tokens, num_heads + 3, head_dim)[:, :num_heads]
    expected = torch.empty(num_tokens, num_heads, head_dim, dtype=torch.float64)
    for row, kv in enumerate(dense):
        tokens = slice(int(rows.query_start[row]), int(rows.query_start[row + 1]))
        expected[tokens] = _dense_attention(q[tokens].double(), *kv.double())
    for kernels in _all(dtype):
        out = kernels.paged_attention(
            q, kv_layer, kernels.plan_attention(rows, kv_layer, num_heads)
        )
        assert out.dtype is dtype
        _assert_close(out, expected.to(dtype))


def test_decode_rows_are_grouped_by_length_only_where_padding_is_wasteful(
    dtype: torch.dtype,
) -> None:
    def num_groups(lens: list[int]) -> int:
        rows, kv_layer, _ = _paged_rows([(1, n) for n in lens], 1, 1, 8, dtype)
        return len(plan_attention(rows, kv_layer, 1).decode_groups)

    assert num_groups([100, 90, 110]) == 1
    assert num_groups([1000] * 3 + [10] * 3) == 2
    assert num_groups([300 + i % 40 for i in range(64)]) == 1


def test_packed_linear_is_refused_with_a_reason_where_it_does_not_work(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        raise RuntimeError("no such primitive\nmore lines")

    monkeypatch.setattr(cpu_linear, "_packed", broken)
    cpu_linear.why_not_packed.cache_clear()
    try:
        choices = select_kernels(dtype, mode="cpu").describe()
        linear = next(c for c in choices if c.op == "linear")
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


def _all(dtype: torch.dtype) -> list[Kernels]:
    """The reference first; where nothing is compiled for `dtype`, "auto" is "cpu" again."""
    return [select_kernels(dtype, mode=mode) for mode in ("reference", "cpu", "auto")]


def _randn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    size = expected.double().abs().max().item()
    error = (found.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE[found.dtype] * size, (error, size)


def _paged_rows(
    sizes: list[tuple[int, int]],
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> tuple[AttentionRows, torch.Tensor, list[torch.Tensor]]:
    """Rows over shuffled pages; slots of no row and garbage table entries point at NaN."""
    num_pages = [-(-keys // page_size) for _, keys in sizes]
    pages = np.random.default_rng(0).permutation(sum(num_pages) + 1)
    unused, taken = int(pages[-1]), 0
    table = np.full((len(sizes), max(num_pages) + 2), unused, dtype=np.int32)
    num_slots = (sum(num_pages) + 1) * page_size
    kv_layer = torch.full((2, num_kv_heads, num_slots, head_dim), torch.nan, dtype=dtype)
    dense = []
    for row, (_, keys) in enumerate(sizes):
        own = pages[taken : taken + num_pages[row]]
        table[row, : len(own)] = own
        taken += len(own)
        slots = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:keys]
        kv = _randn(dtype, 2, num_kv_heads, keys, head_dim)
        kv_layer[:, :, torch.from_numpy(slots)] = kv
        dense.append(kv)
    query_start = np.cumsum([0] + [queries for queries, _ in sizes]).astype(np.int32)
    seq_lens = np.array([keys for _, keys in sizes], dtype=np.int32)
    table_rows = np.arange(len(sizes), dtype=np.int32)
    rows = AttentionRows(query_start, seq_lens, table, table_rows, page_size)
    return rows, kv_layer, dense


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
