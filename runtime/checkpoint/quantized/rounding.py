"""Rounds weights to 8 or 4 bits, to the nearest number, without calibration data.

8 bits: one scale a row, symmetric. 4 bits: a scale and a zero point a group of inputs; of the
group's range and a few narrower ones the one with the least squared error is used, like GPTQ's
`mse` (github.com/IST-DASLab/gptq, quant.py). Scales are float16 numbers and zero points integers
that fit GPTQ's layout, so that a written checkpoint computes the same. Weights that are not finite,
or beyond float16's range, get scales that are not finite.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ....kernels.quantized_tensors import QuantizedWeight

MIN_GROUP_SIZE = 32
MAX_GROUP_SIZE = 128  # default
# Shares of the group's own range; measured, see docs/serve/checkpoints.md.
_SHRINKS = (1.0, 0.9, 0.8)
_SMALLEST_SCALE = 2.0**-24  # float16's
_CHUNK_NUMBERS = 1 << 19  # of a weight at a time, in float32: they fit a core's cache


def group_size_for(in_features: int, largest: int = MAX_GROUP_SIZE) -> int | None:
    """The largest power of two up to `largest` that divides in_features; None: less than 32."""
    size = min(in_features & -in_features, largest)
    return size if size >= MIN_GROUP_SIZE else None


def round_to_8_bits(
    weight: Tensor, activations: Literal["exact", "int8"] = "exact"
) -> QuantizedWeight:
    """weight [out_features, in_features], floating -> numbers in [-127, 127], one scale
    a row and no offsets."""
    num_outputs, num_inputs = weight.shape
    values = torch.empty(num_outputs, num_inputs, dtype=torch.int8, device=weight.device)
    scales = torch.empty(num_outputs, 1, dtype=torch.float32, device=weight.device)
    for rows in _chunks(weight):
        wide = weight[rows].float()
        scale = as_float16(wide.abs().amax(1, keepdim=True) / 127)
        values[rows] = (wide / scale).round_().clamp_(-127, 127).to(torch.int8)
        scales[rows] = scale
    return QuantizedWeight(8, num_inputs, values, scales, None, activations)


def round_to_4_bits(weight: Tensor, group_size: int) -> QuantizedWeight:
    """weight [out_features, in_features], floating; group_size divides in_features.

    With q in [0, 15] and a zero point z in [1, 15] the weight is scale * (q - z). (z = 0, for a
    group without negative numbers, is what GPTQ's layout cannot hold.)
    """
    num_outputs, num_inputs = weight.shape
    shape = (num_outputs, num_inputs // group_size)
    values = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    zeros = torch.empty_like(scales)
    for rows in _chunks(weight):
        groups = weight[rows].float().view(-1, group_size)
        numbers, scale, zero = _best_4_bits(groups)
        pairs = numbers.to(torch.uint8).view(-1, num_inputs // 2, 2)
        values[rows] = pairs[..., 0] | pairs[..., 1] << 4
        scales[rows], zeros[rows] = scale.view(-1, shape[1]), zero.view(-1, shape[1])
    return QuantizedWeight(4, group_size, values, scales, scales * (8 - zeros))


def _best_4_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """groups [N, group_size] float32 -> their numbers [N, group_size] in [0, 15], scales and zero
    points [N, 1]."""
    low = groups.amin(1, keepdim=True).clamp_(max=0.0)
    high = groups.amax(1, keepdim=True).clamp_(min=0.0)
    best_scale = best_zero = torch.empty(0)
    least: Tensor | None = None
    work = torch.empty_like(groups)
    for shrink in _SHRINKS:
        scale = as_float16((high - low) * (shrink / 15))
        zero = (-low * shrink / scale).round_().clamp_(1.0, 15.0)
        _numbers_into(work, groups, scale, zero).sub_(zero).mul_(scale).sub_(groups)
        error = work.square_().sum(1, keepdim=True)
        if least is None:
            best_scale, best_zero, least = scale, zero, error
            continue
        is_better = error < least
        best_scale = torch.where(is_better, scale, best_scale)
        best_zero = torch.where(is_better, zero, best_zero)
        least = torch.where(is_better, error, least)
    return _numbers_into(work, groups, best_scale, best_zero), best_scale, best_zero


def _numbers_into(work: Tensor, groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.div(groups, scale, out=work).add_(zero).round_().clamp_(0.0, 15.0)


def as_float16(scale: Tensor) -> Tensor:
    """Rounded to float16, never 0, in float32; infinite beyond float16's range."""
    return scale.clamp_(min=_SMALLEST_SCALE).half().float()


def _chunks(weight: Tensor) -> list[slice]:
    """Slices of a weight's rows, each within the chunk size."""
    num_outputs, num_inputs = weight.shape
    step = max(1, _CHUNK_NUMBERS // num_inputs)
    return [slice(start, start + step) for start in range(0, num_outputs, step)]
