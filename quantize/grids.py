"""The numbers that a weight is rounded to: a scale and a zero point for each group of inputs.

    weight = scale * (number - zero)

8 bits: numbers in [-127, 127], one scale a row, no zero points. 4 and 3 bits: numbers from 0 on,
zero points from 1 on, which GPTQ's layout can hold. Scales are float16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels.quantized_tensors import QuantizedWeight
from ..runtime.checkpoint.quantized.rounding import as_float16

Bits = Literal[8, 4, 3]
# Shares of a group's own range: the one with the least weighted error is used.
_SHRINKS = tuple(1 - 0.04 * step for step in range(13))


@dataclass(frozen=True, slots=True)
class Grid:
    """Of a weight [out_features, in_features]."""

    bits: Bits
    group_size: int  # divides in_features
    scales: Tensor  # [in_features / group_size, out_features] float32, as zeros
    zeros: Tensor

    @property
    def low(self) -> int:
        """The smallest number."""
        return -127 if self.bits == 8 else 0

    @property
    def high(self) -> int:
        """The largest number."""
        return 127 if self.bits == 8 else (1 << self.bits) - 1

    def numbers(self, values: Tensor, group: int | slice) -> Tensor:
        """values [..., out_features] of inputs of these groups -> the nearest numbers, floating."""
        scales, zeros = self.scales[group], self.zeros[group]
        return (values / scales).add_(zeros).round_().clamp_(self.low, self.high)

    def nearest(self, columns: Tensor) -> Tensor:
        """columns [in_features, out_features] float32 -> the nearest numbers, each by itself."""
        numbers = torch.empty_like(columns)
        for group in range(len(self.scales)):
            own = slice(group * self.group_size, (group + 1) * self.group_size)
            numbers[own] = self.numbers(columns[own], group)
        return numbers

    def values(self, numbers: Tensor) -> Tensor:
        """numbers [in_features, out_features] -> what they stand for, IN PLACE."""
        for group in range(len(self.scales)):
            own = slice(group * self.group_size, (group + 1) * self.group_size)
            numbers[own].sub_(self.zeros[group]).mul_(self.scales[group])
        return numbers

    def packed(self, numbers: Tensor, activations: Literal["exact", "int8"]) -> QuantizedWeight:
        """numbers [in_features, out_features], floating -> the weight. 3 bits are held as 4."""
        scales = self.scales.t().contiguous()
        if self.bits == 8:
            values = numbers.t().to(torch.int8).contiguous()
            return QuantizedWeight(8, self.group_size, values, scales, None, activations)
        halves = numbers.t().to(torch.uint8)
        values = halves[:, ::2] | halves[:, 1::2] << 4
        offsets = scales * (8 - self.zeros.t())
        return QuantizedWeight(4, self.group_size, values, scales, offsets)


def grid_of(columns: Tensor, bits: Bits, group_size: int, importance: Tensor) -> Grid:
    """Of a weight's columns [in_features, out_features] float32; importance [in_features]: what an
    input's squared error counts."""
    num_inputs, num_outputs = columns.shape
    if bits == 8:
        scales = as_float16(columns.abs().amax(0, keepdim=True) / 127)
        return Grid(8, num_inputs, scales, torch.zeros_like(scales))
    num_groups = num_inputs // group_size
    scales = torch.empty(num_groups, num_outputs)
    zeros = torch.empty_like(scales)
    for group in range(num_groups):
        own = slice(group * group_size, (group + 1) * group_size)
        scales[group], zeros[group] = _of_group(columns[own], bits, importance[own])
    return Grid(bits, group_size, scales, zeros)


def _of_group(columns: Tensor, bits: int, importance: Tensor) -> tuple[Tensor, Tensor]:
    """columns [group_size, out_features] -> scales and zero points [out_features]."""
    high = (1 << bits) - 1
    low_end, high_end = columns.amin(0).clamp_(max=0.0), columns.amax(0).clamp_(min=0.0)
    weights = importance / importance.sum().clamp_(min=1e-30)
    best_scale = best_zero = least = None
    for shrink in _SHRINKS:
        scale = as_float16((high_end - low_end) * (shrink / high))
        zero = (-low_end * shrink / scale).round_().clamp_(1.0, high)
        rounded = (columns / scale).add_(zero).round_().clamp_(0.0, high).sub_(zero).mul_(scale)
        error = weights @ rounded.sub_(columns).square_()
        if best_scale is None or best_zero is None or least is None:
            best_scale, best_zero, least = scale, zero, error
            continue
        is_better = error < least
        best_scale = torch.where(is_better, scale, best_scale)
        best_zero = torch.where(is_better, zero, best_zero)
        least = torch.where(is_better, error, least)
    assert best_scale is not None and best_zero is not None
    return best_scale, best_zero
