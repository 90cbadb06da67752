"""A CPU's rotary embedding and KV store, also in 8 and 4 bits and of part of each head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from stemma.kernels.attention_rows import AttentionRows
from stemma.kernels.kv_cache_dtype import INT4_STEP
from stemma.kernels.quantized_tensors import QuantizedKV
from stemma.kernels.reference import kv_store as reference
from stemma.kernels.registry import KernelMode, select_kernels

NUM_HEADS, NUM_KV_HEADS, NUM_TOKENS, NUM_SLOTS = 3, 2, 41, 45
FORMATS = [torch.int8, torch.float8_e4m3fn, torch.uint8]  # uint8: 4 bits
PATHS: list[tuple[KernelMode, torch.dtype]] = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    ("auto", torch.bfloat16),
]


@pytest.mark.parametrize(("mode", "dtype"), PATHS, ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (80, 32), (64, 6), (24, 24), (96, 96)]
)
@pytest.mark.parametrize("format_dtype", FORMATS, ids=str)
def test_a_quantized_pool_is_the_plain_one_quantized_bit_by_bit(
    mode: KernelMode, dtype: torch.dtype, head_dim: int, rotary_dim: int, format_dtype: torch.dtype
) -> None:
    if format_dtype is torch.uint8 and head_dim % INT4_STEP:
        pytest.skip("4 bits take other heads")
    heads, cos, sin, slots = _inputs(head_dim, rotary_dim, dtype)
    store = select_kernels(dtype, mode=mode).rotate_and_store
    shape = (2, NUM_KV_HEADS, NUM_SLOTS, head_dim)
    plain, plain_heads = torch.zeros(shape, dtype=dtype), heads.clone()
    store(plain_heads, cos, sin, plain, slots)
    found = QuantizedKV(*reference.quantized(torch.zeros(shape), format_dtype))
    store(heads, cos, sin, found, slots)
    assert torch.equal(heads[:, :NUM_HEADS], plain_heads[:, :NUM_HEADS]), "the queries"
    values, scales = reference.quantized(plain, format_dtype)
    assert torch.equal(reference.as_bytes(found.values), reference.as_bytes(values))
    torch.testing.assert_close(found.scales, scales, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("mode", "dtype"), PATHS, ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 16, 40, 80])
def test_what_follows_the_rotated_part_of_a_head_stays(
    mode: KernelMode, dtype: torch.dtype, rotary_dim: int
) -> None:
    _, cos, sin, slots = _inputs(80, rotary_dim, dtype)
    heads = torch.randn(NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, 80).to(dtype)
    found, expected = [], []
    for run, results in (
        (select_kernels(dtype, mode=mode).rotate_and_store, found),
        (reference.rotate_and_store, expected),
    ):
        rotated = heads.clone()
        kv_layer = torch.zeros((2, NUM_KV_HEADS, NUM_SLOTS, 80), dtype=dtype)
        run(rotated, cos, sin, kv_layer, slots)
        results += [rotated[:, :NUM_HEADS], kv_layer[0][:, slots], kv_layer[1][:, slots]]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[..., rotary_dim:], other[..., rotary_dim:])
        torch.testing.assert_close(one, other, atol=0.05, rtol=0)


@pytest.mark.parametrize("format_dtype", FORMATS[:2], ids=str)
def test_every_number_of_the_format_is_read_as_itself(format_dtype: torch.dtype) -> None:
    """Through attention over one key: the value comes back, be it any that is ever stored."""
    kernels = select_kernels(torch.bfloat16)
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 16).view(format_dtype)
    values = torch.zeros(2, 1, 16, 16, dtype=torch.uint8).view(format_dtype)
    reference.as_bytes(values)[1, 0] = reference.as_bytes(numbers)
    kv_layer = QuantizedKV(values, torch.ones(2, 1, 16))
    rows = _single_tokens(16)
    plan = kernels.plan_attention(rows, kv_layer, 1)
    found = kernels.paged_attention(torch.zeros(16, 1, 16).bfloat16(), kv_layer, plan)[:, 0].float()
    expected = numbers.float()
    is_number = expected.isfinite() & (expected != -128)
    assert torch.equal(found[is_number], expected[is_number])


@pytest.mark.parametrize("mode", ["cpu", "auto"])
def test_every_byte_of_4_bits_is_read_as_its_two_numbers(mode: KernelMode) -> None:
    """Through attention over one key."""
    kernels = select_kernels(torch.bfloat16, mode=mode)
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 16)
    # Of the halves the scales 2 and 3, the zeros 7 and -1.
    scales = torch.tensor([21 << 3, (21 << 3) + 4, 15 * 8, 7 * 8], dtype=torch.uint8)
    scales = scales.expand(2, 1, 16, 4).contiguous()
    kv_layer = QuantizedKV(numbers.expand(2, 1, 16, 16).contiguous(), scales)
    plan = kernels.plan_attention(_single_tokens(16), kv_layer, 1)
    found = kernels.paged_attention(torch.zeros(16, 1, 32).bfloat16(), kv_layer, plan)[:, 0]
    first, second = (numbers & 15).float() - 7, (numbers >> 4).float() + 1
    expected = reference.hadamard(torch.cat((2 * first, 3 * second), 1))
    assert torch.equal(reference.dequantized(kv_layer.values[1, 0], scales[1, 0]), expected)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-3)


def test_4_bits_spread_what_is_large_over_all_numbers() -> None:
    """A key of numbers like those of others, but for one that is ten times larger: as well kept as
    without it, where its neighbours would lose most of their bits."""
    plain = torch.randn(500, 64, generator=torch.Generator().manual_seed(2))
    with_peak = plain.clone()
    with_peak[:, 17] += 10.0
    errors = []
    for x in (plain, with_peak):
        found = reference.dequantized(*reference.quantized(x, torch.uint8))
        errors.append((found - x).square().mean().sqrt().item())
    assert errors[0] < 0.09 and errors[1] < 1.6 * errors[0]


@pytest.mark.parametrize("size", [16, 48, 64, 80, 128])
def test_the_transform_keeps_products_and_is_its_own_inverse(size: int) -> None:
    x = torch.randn(9, size, dtype=torch.float64)
    y = reference.hadamard(x)
    torch.testing.assert_close(reference.hadamard(y), x)
    torch.testing.assert_close(y @ y.T, x @ x.T)
    assert torch.equal(reference.hadamard(x[3]), y[3])


def _inputs(
    head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads with zeros, tiny and huge numbers, infinities and NaN among them; cos, sin, slots."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = (NUM_TOKENS, NUM_HEADS + 2 * NUM_KV_HEADS, head_dim)
    heads = torch.randn(shape, generator=generator)
    size = torch.tensor([0.0, 1e-37, 1e-20, 1e-3, 1.0, 100.0, 1e30])
    heads *= size[torch.arange(NUM_TOKENS) % len(size), None, None]
    heads[5, -1, 3], heads[6, -2, 0], heads[12, -1] = torch.nan, torch.inf, torch.nan
    heads[11, -1] = torch.arange(head_dim).float() - 8  # ties
    angle = torch.arange(NUM_TOKENS)[:, None, None] * 0.3 + torch.arange(rotary_dim // 2) * 0.1
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    return heads.to(dtype), cos, sin, torch.randperm(NUM_SLOTS, generator=generator)[:NUM_TOKENS]


def _single_tokens(num_rows: int) -> AttentionRows:
    """Rows of one token each, in a slot of its own."""
    each = np.arange(num_rows + 1, dtype=np.int32)
    ones = np.ones(num_rows, dtype=np.int32)
    return AttentionRows(each, ones, each[:-1, None], each[:-1], 1)
