"""Stacks weights of several modules along their outputs, also in different formats."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from ....kernels.ops import Weight
from ....kernels.quantized_tensors import QuantizedWeight
from ....kernels.reference.quantized import dequantize, signed_numbers


def stack_weights(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """Parts with different bits and groups get the wider bits and the smaller groups, without loss;
    if one is floating, all become so, in `dtype`. Otherwise they have one order of inputs."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedWeight)]
    if len(quantized) == len(parts):
        return _stack_quantized(quantized)
    return torch.cat(
        [dequantize(part, dtype) if isinstance(part, QuantizedWeight) else part for part in parts]
    )


def _stack_quantized(parts: list[QuantizedWeight]) -> QuantizedWeight:
    codes = {part.codes for part in parts}
    bits: Literal[8, 4] = 4 if len(codes) == 1 and all(part.bits == 4 for part in parts) else 8
    group_size = gcd(*(part.group_size for part in parts))
    has_offsets = any(part.offsets is not None for part in parts)
    is_exact = any(part.activations == "exact" for part in parts)
    return QuantizedWeight(
        bits,
        group_size,
        torch.cat([signed_numbers(part) if bits > part.bits else part.values for part in parts]),
        torch.cat([_per_group(part, part.scales, group_size) for part in parts]),
        torch.cat([_offsets(part, group_size) for part in parts]) if has_offsets else None,
        "exact" if is_exact else "int8",
        parts[0].input_order,
        codes.pop() if bits == 4 else "integer",
    )


def _offsets(weight: QuantizedWeight, group_size: int) -> Tensor:
    offsets = torch.zeros_like(weight.scales) if weight.offsets is None else weight.offsets
    return _per_group(weight, offsets, group_size)


def _per_group(weight: QuantizedWeight, values: Tensor, group_size: int) -> Tensor:
    """values [out_features, groups] float32 -> those of smaller groups."""
    return values.float().repeat_interleave(weight.group_size // group_size, dim=1)
