"""Linear layers of quantized weights through torch, for CPUs without compiled kernels.

Weights stay packed: torch's own products of packed weights run where they are correct and fastest
(docs/decisions/0017-integer-products.md has the measurements), else a few rows at a time are
dequantized into the cache and multiplied. The private ops are looked up, and checked once, before
they are used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..input_order import over_ordered_inputs
from ..ops import Linear
from ..quantized_tensors import QuantizedWeight
from ..reference.quantized import (
    dequantize,
    quantized_product,
    round_rows,
    rounds_activations,
    signed_numbers,
)

_BLOCK_NUMBERS = 1 << 17  # dequantized at a time: half a core's second-level cache in float32
_FEW_ROWS = 64  # up to this torch's product of 8-bit weights is faster than dequantizing them
_INT8, _INT4, _INTEGERS = "_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_int_mm"
_INT4_GROUP_SIZES = (32, 64, 128, 256)


def make_linear(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """For x of `dtype`, float32 or bfloat16."""
    if weight.input_order is not None:
        return over_ordered_inputs(weight, lambda plain: make_linear(plain, bias, dtype))
    is_per_row = weight.group_size == weight.in_features and weight.offsets is None
    if rounds_activations(weight):
        fits = is_per_row and _works(_INTEGERS)
        return _Rounded(weight, bias) if fits else _Blockwise(weight, bias)
    if dtype is not torch.bfloat16:
        return _Blockwise(weight, bias)
    # NOTE: with rows of other lengths torch 2.13 reads beyond their ends.
    if weight.bits == 8 and is_per_row and weight.in_features % 32 == 0 and _works(_INT8):
        return _Int8(weight, bias)
    if _has_int4_layout(weight) and _works(_INT4):
        return _Int4(weight, bias)
    return _Blockwise(weight, bias)


class _Blockwise:
    """Dequantizes and multiplies the weight some rows at a time."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._bias = bias
        step = max(1, _BLOCK_NUMBERS // weight.in_features)
        self._blocks = [
            _rows(weight, slice(start, start + step))
            for start in range(0, weight.out_features, step)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.cat([_product(x, block) for block in self._blocks], -1)
        return product if self._bias is None else product.add_(self._bias)


class _Int8:
    """W8A16 with one scale a row."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._values = weight.values.contiguous()
        self._scales = weight.scales[:, 0].to(torch.bfloat16).contiguous()
        self._bias = bias
        self._blockwise = _Blockwise(replace(weight, values=self._values), bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] > _FEW_ROWS:
            return self._blockwise(x)
        product: Tensor = torch.ops.aten._weight_int8pack_mm(
            x.contiguous(), self._values, self._scales
        )
        return product if self._bias is None else product.add_(self._bias)


class _Int4:
    """W4A16 in groups; scales and offsets are rounded to bfloat16."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        numbers = signed_numbers(weight).to(torch.int32) + 8
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
        offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
        both = torch.stack((weight.scales.T, offsets.T), -1)
        self._scales = both.to(torch.bfloat16).contiguous()
        self._group_size, self._bias = weight.group_size, bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.contiguous(), self._packed, self._group_size, self._scales
        )
        return product if self._bias is None else product.add_(self._bias)


class _Rounded:
    """W8A8 with one scale a row: a product of integers."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        self._transposed = weight.values.contiguous().T
        self._scales = weight.scales[:, 0].float()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = round_rows(x.float())
        product = torch._int_mm(numbers.to(torch.int8), self._transposed).float()
        product.mul_(scales).mul_(self._scales)
        return (product if self._bias is None else product.add_(self._bias)).to(x.dtype)


def _product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    if rounds_activations(weight):
        return quantized_product(x, weight, None).to(x.dtype)
    if weight.group_size == weight.in_features and weight.offsets is None:
        return F.linear(x, signed_numbers(weight).to(x.dtype)).mul_(weight.scales[:, 0])
    return F.linear(x, dequantize(weight, x.dtype))


def _rows(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    offsets = None if weight.offsets is None else weight.offsets[rows]
    return replace(weight, values=weight.values[rows], scales=weight.scales[rows], offsets=offsets)


def _has_int4_layout(weight: QuantizedWeight) -> bool:
    """Whether torch's product of 4-bit weights accepts it."""
    return (
        weight.bits == 4
        and weight.codes == "integer"
        and weight.group_size in _INT4_GROUP_SIZES
        and weight.out_features % 16 == 0
    )


@functools.cache
def _works(op: str) -> bool:
    """Whether torch's op exists and is correct."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).to(torch.bfloat16)
    scales = torch.rand(32, 2, generator=generator).to(torch.bfloat16)
    bits = 4 if op == _INT4 else 8
    shape, dtype = ((32, 32), torch.uint8) if bits == 4 else ((32, 64), torch.int8)
    limits = torch.iinfo(dtype)
    values = torch.randint(limits.min, limits.max + 1, shape, generator=generator).to(dtype)
    if bits == 4:
        weight = QuantizedWeight(4, 32, values, scales, scales * 2)
    else:
        weight = QuantizedWeight(
            8, 64, values, scales[:, :1], None, "int8" if op == _INTEGERS else "exact"
        )
    kinds: dict[str, Callable[[QuantizedWeight, None], Linear]] = {
        "_int_mm": _Rounded, "_weight_int8pack_mm": _Int8
    }  # fmt: skip
    try:
        found = kinds.get(op, _Int4)(weight, None)(x)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return False
    expected = quantized_product(x, weight, None)
    return bool((found - expected).abs().max() <= 0.02 * expected.abs().max())
