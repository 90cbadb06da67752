"""Quantized weights in GPTQ's layout, as `packed.read_gptq` and other engines read them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ....kernels.quantized_tensors import QuantizedWeight

ZERO_SHIFT = 1  # subtracted from zero points in the first layout; see packed.read_gptq

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def fits_gptq(out_features: int, in_features: int, bits: int) -> bool:
    """Whether a weight's numbers and zero points fill words of 32 bits without a remainder."""
    return out_features * bits % 32 == 0 and in_features * bits % 32 == 0


def gptq_shapes(
    name: str, out_features: int, in_features: int, bits: int, group_size: int
) -> Shapes:
    """The shapes of `gptq_tensors`, before these are made."""
    num_groups = in_features // group_size
    return {
        f"{name}.qweight": ((in_features * bits // 32, out_features), torch.int32),
        f"{name}.qzeros": ((num_groups, out_features * bits // 32), torch.int32),
        f"{name}.scales": ((num_groups, out_features), torch.float16),
        f"{name}.g_idx": ((in_features,), torch.int32),
    }


def gptq_tensors(name: str, weight: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of the module `name`, whose weight comes from `rounding`: its scales fit float16,
    and its zero points are integers."""
    words = weight.values if weight.bits == 4 else weight.values.view(torch.uint8) ^ 0x80
    middle = 1 << (weight.bits - 1)
    zeros = torch.full_like(weight.scales, middle)
    if weight.offsets is not None:
        zeros -= weight.offsets / weight.scales
    octets = (zeros.round_() - ZERO_SHIFT).to(torch.uint8).t().contiguous()
    if weight.bits == 4:
        octets = octets[:, ::2] | octets[:, 1::2] << 4
    groups = torch.arange(weight.in_features, dtype=torch.int32) // weight.group_size
    return {
        f"{name}.qweight": _as_words(words).t().contiguous(),
        f"{name}.qzeros": _as_words(octets),
        f"{name}.scales": weight.scales.t().to(torch.float16).contiguous(),
        f"{name}.g_idx": groups,
    }


def _as_words(octets: Tensor) -> Tensor:
    """[N, 4 * M] uint8 -> [N, M] int32, lowest byte first."""
    return octets.contiguous().view(-1).view(torch.int32).view(len(octets), -1)
