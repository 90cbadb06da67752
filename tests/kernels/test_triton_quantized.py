"""Products with weights in 8 and 4 bits against float64, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from stemma.kernels.ops import Activation
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference.dense import act_and_mul
from stemma.kernels.reference.quantized import dequantize, round_rows
from stemma.kernels.triton import dense, quantized_linear

# Of the largest result.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}
Bits = Literal[8, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 20, 70])
@pytest.mark.parametrize(
    ("bits", "shape", "group"),
    [
        (8, (70, 256), 256),  # a scale a row
        (8, (70, 96), 96),  # inputs that fill no block
        (8, (40, 256), 128),
        (8, (40, 64), 32),
        (8, (33, 64), 16),
        (4, (70, 256), 128),
        (4, (40, 512), 256),  # a group of two blocks
        (4, (40, 64), 32),
        (4, (33, 96), 96),
        (4, (33, 64), 16),
    ],
)
def test_products_are_those_of_the_weight_as_floats(
    bits: Bits, shape: tuple[int, int], group: int, num_tokens: int, dtype: torch.dtype
) -> None:
    for has_offsets in (False, True):
        weight, dense_weight = _weight(bits, shape, group, has_offsets)
        x, bias = _numbers(num_tokens, shape[1]).to(dtype), _numbers(shape[0]).to(dtype)
        expected = x.double() @ dense_weight.T + bias.double()
        found = quantized_linear.make_linear(weight, bias)(x)
        assert found.dtype is dtype
        _assert_close(found, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("group", [32, 16, 128])
def test_codes_of_small_floats(group: int, dtype: torch.dtype) -> None:
    weight = replace(_weight(4, (40, 256), group)[0], codes="fp4")
    for num_tokens in (1, 70):
        x = _numbers(num_tokens, 256).to(dtype)
        found = quantized_linear.make_linear(weight, None)(x)
        _assert_close(found, x.double() @ dequantize(weight, torch.float64).T, TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weight_with_few_rows_is_split_along_its_inputs(bits: Bits) -> None:
    weight, dense_weight = _weight(bits, (16, 2048), 2048 if bits == 8 else 128)
    layer = quantized_linear.make_linear(weight, _numbers(16))
    assert isinstance(layer, quantized_linear._WeightOnlyLinear) and layer._splits() > 1
    x = _numbers(3, 2048)
    _assert_close(layer(x), x.double() @ dense_weight.T + _numbers(16).double(), 1e-6)


def test_inputs_of_a_weight_with_offsets_are_never_rounded() -> None:
    weight, dense_weight = _weight(8, (33, 64), 64, has_offsets=True, activations="int8")
    x = _numbers(3, 64)
    found = quantized_linear.make_linear(weight, None)(x)
    _assert_close(found, x.double() @ dense_weight.T, 1e-6)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight, _ = _weight(4, (40, 1024), 128)
    layer = quantized_linear.make_linear(weight, None)
    x = _numbers(64, 1024)
    whole = layer(x)
    for count in (17, 33, 64):
        assert torch.equal(layer(x[:count]), whole[:count])
    few = layer(x[:16])
    assert torch.equal(layer(x[3:4]), few[3:4])


def test_activations_are_rounded_as_the_reference_rounds_them() -> None:
    x = _numbers(7, 300) * torch.tensor([1.0, 100, 1e-3, 0, 1e-32, 1, 1])[:, None]
    x[5, 299], x[6, 0] = torch.nan, -torch.inf
    numbers, scales = quantized_linear.round_rows(x)
    expected, expected_scales = round_rows(x)
    assert torch.equal(numbers[:5].float(), expected[:5])
    assert torch.equal(scales[:5], expected_scales[:5, 0]) and scales[5:].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 20, 70])
def test_w8a8_is_the_product_of_the_rounded_numbers(num_tokens: int) -> None:
    weight, dense_weight = _weight(8, (50, 300), 300, activations="int8")
    x, bias = _numbers(num_tokens, 300), _numbers(50)
    numbers, scales = quantized_linear.round_rows(x)
    rounded = numbers.double() * scales[:, None].double()
    found = quantized_linear.make_linear(weight, bias)(x)
    _assert_close(found, rounded @ dense_weight.T + bias.double(), 1e-6)


def test_logits_are_float32_and_gates_are_applied() -> None:
    weight, dense_weight = _weight(8, (64, 128), 128)
    x = _numbers(2, 128).half()
    logits = dense.make_output_linear(weight)(x)
    assert logits.dtype is torch.float32
    _assert_close(logits, x.double() @ dense_weight.T, 1e-6)
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    for activation in activations:
        gated = dense.make_gated_linear(weight, None, activation)(x)
        expected = act_and_mul((x.double() @ dense_weight.T).half(), activation)
        _assert_close(gated, expected.double(), 3e-3)


def test_inputs_may_be_in_another_order() -> None:
    weight, _ = _weight(4, (16, 64), 32, True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    ordered, x = replace(weight, input_order=order.to(torch.int32)), _numbers(3, 64)
    expected = dense.make_linear(weight, None)(x[:, order])
    assert torch.equal(dense.make_linear(ordered, None)(x), expected)


def test_no_tokens_are_no_work() -> None:
    weight, _ = _weight(4, (16, 64), 32)
    assert quantized_linear.make_linear(weight, None)(torch.empty(0, 64)).shape == (0, 16)


def _weight(
    bits: Bits,
    shape: tuple[int, int],
    group: int,
    has_offsets: bool = False,
    activations: Literal["exact", "int8"] = "exact",
) -> tuple[QuantizedWeight, Tensor]:
    """Random, and the same in float64."""
    generator = torch.Generator().manual_seed(1)
    limit = 1 << (bits - 1)
    numbers = torch.randint(-limit, limit, shape, generator=generator)
    groups = (shape[0], shape[1] // group)
    scales = torch.rand(groups, generator=generator) * 0.02 + 0.001
    offsets = torch.randn(groups, generator=generator) * 0.05 if has_offsets else None
    whole = numbers.double() * scales.double().repeat_interleave(group, 1)
    if offsets is not None:
        whole += offsets.double().repeat_interleave(group, 1)
    if bits == 8:
        values = numbers.to(torch.int8)
    else:
        values = ((numbers[:, ::2] + 8) | (numbers[:, 1::2] + 8) << 4).to(torch.uint8)
    return QuantizedWeight(bits, group, values, scales, offsets, activations), whole


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"differs by {error:.2e}"
