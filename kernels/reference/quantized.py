"""Linear layers of quantized weights, by their definition: the truth.

A weight is dequantized at each call, in float32 or better, and never rounded to the dtype of x. If
its activations are "int8" and it has 8 bits, each row of x is rounded first (4-bit weights use x
unrounded):

    scale = max(largest |x| of the row, 1e-30) / 127
    number = x * (127 / max(largest |x|, 1e-30)), rounded half to even

The products of numbers and their sums over a group of inputs are exact integers, then scaled in
float32. A row with a value that is not finite gets NaN.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..quantized_tensors import E2M1_NUMBERS, QuantizedWeight

SMALLEST_PEAK = 1e-30  # so that a row of zeros has a scale


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """[..., out_features, in_features], inputs in order; computed in float32, in float64 for
    float64."""
    wide = _wide(dtype)
    numbers = signed_numbers(weight)
    groups = numbers.view(*numbers.shape[:-1], -1, weight.group_size).to(wide)
    groups *= weight.scales.to(wide)[..., None]
    if weight.offsets is not None:
        groups += weight.offsets.to(wide)[..., None]
    matrix = groups.flatten(-2).to(dtype)
    if weight.input_order is None:
        return matrix
    inputs = weight.input_order.long().unsqueeze(-2).expand_as(matrix)
    return torch.empty_like(matrix).scatter_(-1, inputs, matrix)


def signed_numbers(weight: QuantizedWeight) -> Tensor:
    """[..., out_features, in_features] int8, in the weight's own order."""
    if weight.bits == 8:
        return weight.values
    halves = torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(-2)
    if weight.codes == "integer":
        return halves.to(torch.int8) - 8
    numbers = torch.tensor(E2M1_NUMBERS, dtype=torch.int8, device=halves.device)
    return numbers[halves.int()]


def rounds_activations(weight: QuantizedWeight) -> bool:
    """Whether each row of x is rounded to 8 bits."""
    return weight.activations == "int8" and weight.bits == 8


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] float32 or float64 -> integers [T, K] in [-127, 127] and scales [T, 1], both in the
    dtype of x; NaN if a row of x has a value that is not finite."""
    peak = x.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_PEAK)
    peak = peak.where(peak.isfinite(), torch.nan)
    return (x * (127 / peak)).round_(), peak / 127


def quantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x [T, in_features] -> x @ weight.T + bias [T, out_features] in float32, in float64 for
    float64."""
    wide = x.to(_wide(x.dtype))
    matrix = dequantize(weight, wide.dtype)
    if rounds_activations(weight):
        numbers, scales = round_rows(wide)
        product = F.linear(numbers, matrix).mul_(scales)
    else:
        product = F.linear(wide, matrix)
    return product if bias is None else product.add_(bias)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
