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


def gptq_tensors(name: str, weight: QuantizedWeight, bits: int | None = None) -> dict[str, Tensor]:
    """The tensors of the module `name`, whose scales fit float16, and whose zero points are
    integers. bits: 3 of a weight of 4 bits whose numbers lie in [-8, -1]; None: the weight's."""
    bits = weight.bits if bits is None else bits
    words = weight.values if weight.bits == 4 else weight.values.view(torch.uint8) ^ 0x80
    middle = 1 << (weight.bits - 1)
    zeros = torch.full_like(weight.scales, middle)
    if weight.offsets is not None:
        zeros -= weight.offsets / weight.scales
    octets = (zeros.round_() - ZERO_SHIFT).to(torch.uint8).t().contiguous()
    if bits == 3:
        halves = torch.stack((words & 15, words >> 4), -1).flatten(1)
        packed, packed_zeros = words_of_3_bits(halves), words_of_3_bits(octets)
    else:
        octets = octets[:, ::2] | octets[:, 1::2] << 4 if bits == 4 else octets
        packed, packed_zeros = as_words(words), as_words(octets)
    groups = torch.arange(weight.in_features, dtype=torch.int32) // weight.group_size
    return {
        f"{name}.qweight": packed.t().contiguous(),
        f"{name}.qzeros": packed_zeros,
        f"{name}.scales": weight.scales.t().to(torch.float16).contiguous(),
        f"{name}.g_idx": groups,
    }


def as_words(octets: Tensor) -> Tensor:
    """[N, 4 * M] uint8 -> [N, M] int32, lowest byte first."""
    return octets.contiguous().view(-1).view(torch.int32).view(len(octets), -1)


def words_of_3_bits(numbers: Tensor) -> Tensor:
    """[N, 32 * M] uint8 -> [N, 3 * M] int32: a stream of bits, the lowest first."""
    runs = numbers.view(len(numbers), -1, 32).long()
    words = torch.zeros(*runs.shape[:2], 3, dtype=torch.int64)
    for place in range(32):
        word, shift = divmod(3 * place, 32)
        words[..., word] |= runs[..., place] << shift & 0xFFFFFFFF
        if shift > 29:
            words[..., word + 1] |= runs[..., place] >> 32 - shift
    return words.flatten(1).to(torch.int32)


def numbers_of_3_bits(words: Tensor) -> Tensor:
    """[N, 3 * M] int32 -> [N, 32 * M] uint8."""
    runs = words.reshape(len(words), -1, 3).long() & 0xFFFFFFFF
    numbers = torch.empty(*runs.shape[:2], 32, dtype=torch.uint8)
    for place in range(32):
        word, shift = divmod(3 * place, 32)
        bits = runs[..., word] >> shift
        if shift > 29:
            bits |= runs[..., word + 1] << 32 - shift
        numbers[..., place] = bits & 7
    return numbers.flatten(1)
