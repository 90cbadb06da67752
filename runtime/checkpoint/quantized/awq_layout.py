"""Quantized weights in AWQ's gemm layout, as `packed.read_awq` and other engines read them."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.quantized_tensors import QuantizedWeight
from .gptq_layout import Shapes, as_words

# The column, of eight consecutive ones, of each number of an int32, the one in its lowest bits
# first (github.com/casper-hansen/AutoAWQ).
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def fits_awq(out_features: int) -> bool:
    """Whether a row of numbers fills words of 32 bits without a remainder."""
    return out_features % len(AWQ_COLUMNS) == 0


def awq_shapes(name: str, out_features: int, in_features: int, group_size: int) -> Shapes:
    """The shapes of `awq_tensors`, before these are made."""
    num_groups = in_features // group_size
    return {
        f"{name}.qweight": ((in_features, out_features // 8), torch.int32),
        f"{name}.qzeros": ((num_groups, out_features // 8), torch.int32),
        f"{name}.scales": ((num_groups, out_features), torch.float16),
    }


def awq_tensors(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of the module `name`, a weight of 4 bits whose scales fit float16, and whose zero
    points are integers."""
    zeros = torch.full_like(weight.scales, 8)
    if weight.offsets is not None:
        zeros -= weight.offsets / weight.scales
    numbers = torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(1)
    return {
        f"{name}.qweight": _packed(numbers.t()),
        f"{name}.qzeros": _packed(zeros.round_().to(torch.uint8).t()),
        f"{name}.scales": weight.scales.t().to(torch.float16).contiguous(),
    }


def _packed(numbers: Tensor) -> Tensor:
    """[N, out] uint8 -> [N, out / 8] int32."""
    halves = numbers.reshape(len(numbers), -1, 8)[..., list(AWQ_COLUMNS)].flatten(1)
    return as_words(halves[:, ::2] | halves[:, 1::2] << 4)
