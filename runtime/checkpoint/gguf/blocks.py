"""Converts GGUF's blocks of numbers to floats, and to the affine numbers of linear layers.

Each quantized format is affine in groups of a block's values: weight = scale * number + offset.
The numbers of formats with offsets are unsigned. Block structures: ggml-common.h; "K" formats hold
super-blocks of 256 values, whose scales (and minima) are 6-bit numbers times one float16.

Torch throughout, so that blocks can be unpacked on their target device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ....kernels.quantized_tensors import E2M1_NUMBERS
from .formats import BlockFormat

_HALF_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of numbers with their scales and offsets; 4-bit numbers are not packed yet."""

    numbers: Tensor  # [num_rows, num_blocks, groups a block, group_size] uint8 or int8
    scales: Tensor  # [num_rows, num_blocks, groups a block] float32
    offsets: Tensor | None  # as scales


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The layout of a format's weights as a QuantizedWeight."""

    bits: Literal[8, 4]
    group_size: int
    has_offsets: bool
    codes: Literal["integer", "fp4"] = "integer"


LAYOUTS = {
    "Q4_0": GroupLayout(4, 32, False),
    "Q4_1": GroupLayout(4, 32, True),
    "Q5_0": GroupLayout(8, 32, False),
    "Q5_1": GroupLayout(8, 32, True),
    "Q8_0": GroupLayout(8, 32, False),
    "Q4_K": GroupLayout(4, 32, True),
    "Q5_K": GroupLayout(8, 32, True),
    "Q6_K": GroupLayout(8, 16, False),
    "MXFP4": GroupLayout(4, 32, False, "fp4"),
}


def to_floats(form: BlockFormat, rows: Tensor) -> Tensor:
    """rows [num_rows, row_bytes] uint8 -> [num_rows, row_values] float32, or in their own dtype if
    they are floats; bit-identical to ggml."""
    if form.name in _FLOATS:
        return rows.view(_FLOATS[form.name])
    groups = _UNPACKERS[form.name](_blocks(form, rows))
    values = groups.numbers.float().mul_(groups.scales.unsqueeze(-1))
    if groups.offsets is not None:
        values.add_(groups.offsets.unsqueeze(-1))
    return values.view(rows.shape[0], -1)


def to_groups(
    form: BlockFormat, rows: Tensor, layout: GroupLayout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """rows [num_rows, row_bytes] uint8 of a quantized format -> values, scales and offsets as in
    `QuantizedWeight`, scales and offsets in float32.

    `layout`: the format's own, or one with more bits, smaller groups or offsets.
    """
    groups = _UNPACKERS[form.name](_blocks(form, rows))
    own = LAYOUTS[form.name]
    num_rows = rows.shape[0]
    if layout.codes == "fp4":
        codes = _packed(_mxfp4_codes(_blocks(form, rows)))
        return codes.reshape(num_rows, -1), groups.scales.reshape(num_rows, -1), None
    numbers, scales = groups.numbers, groups.scales.reshape(num_rows, -1)
    offsets = None if groups.offsets is None else groups.offsets.reshape(num_rows, -1)
    if own.bits == 4 and numbers.dtype == torch.uint8 and layout.bits == 4:
        # Nibbles count from -8 on.
        assert offsets is not None
        offsets = offsets + 8 * scales
        values = _packed(numbers)
    elif layout.bits == 4:
        values = _packed(numbers + 8)
    else:
        values = numbers.view(torch.int8)
    if own.group_size != layout.group_size:
        repeats = own.group_size // layout.group_size
        scales = scales.repeat_interleave(repeats, dim=-1)
        offsets = None if offsets is None else offsets.repeat_interleave(repeats, dim=-1)
    if layout.has_offsets and offsets is None:
        offsets = torch.zeros_like(scales)
    return values.reshape(num_rows, -1), scales, offsets


def fits_half(*tensors: Tensor | None) -> bool:
    """Whether all their numbers fit float16 without becoming infinite."""
    present = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    return all(float(tensor.abs().max()) <= _HALF_LARGEST for tensor in present)


def _packed(numbers: Tensor) -> Tensor:
    """[..., n] of 0 to 15 -> [..., n / 2] uint8, the even places in the low halves."""
    numbers = numbers.view(torch.uint8)
    return numbers[..., 0::2] | numbers[..., 1::2] << 4


def _blocks(form: BlockFormat, rows: Tensor) -> Tensor:
    return rows.view(rows.shape[0], -1, form.block_bytes)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at this byte of each block, as float32 [num_rows, num_blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, size: int) -> Tensor:
    """Runs of `size` bytes hold `size` values in their low halves, then as many in their high ones:
    [..., n] -> [..., n / size * 2, size]."""
    runs = data.reshape(*data.shape[:-1], -1, 1, size)
    return torch.cat((runs & 15, runs >> 4), dim=-2).flatten(-3, -2)


def _bits(data: Tensor, num_bits: int) -> Tensor:
    """Each byte holds a field of `num_bits` of 8 / num_bits runs: [..., n] -> [..., 8 / num_bits,
    n]."""
    mask = (1 << num_bits) - 1
    return torch.stack([data >> shift & mask for shift in range(0, 8, num_bits)], dim=-2)


def _q4_0(blocks: Tensor) -> Groups:
    numbers = _nibbles(blocks[..., 2:], 16).flatten(-2).view(torch.int8) - 8
    return Groups(numbers.unsqueeze(-2), _half(blocks, 0), None)


def _q4_1(blocks: Tensor) -> Groups:
    numbers = _nibbles(blocks[..., 4:], 16).flatten(-2)
    return Groups(numbers.unsqueeze(-2), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Groups:
    low = _nibbles(blocks[..., 6:], 16).flatten(-2)
    numbers = (low | _fifth_bits(blocks[..., 2:6])).view(torch.int8) - 16
    return Groups(numbers.unsqueeze(-2), _half(blocks, 0), None)


def _q5_1(blocks: Tensor) -> Groups:
    low = _nibbles(blocks[..., 8:], 16).flatten(-2)
    numbers = low | _fifth_bits(blocks[..., 4:8])
    return Groups(numbers.unsqueeze(-2), _half(blocks, 0), _half(blocks, 2))


def _fifth_bits(data: Tensor) -> Tensor:
    """[..., 4] bytes -> [..., 32] of 0 or 16: bit i is value i's."""
    return (_bits(data, 1).transpose(-1, -2) << 4).flatten(-2)


def _q8_0(blocks: Tensor) -> Groups:
    numbers = blocks[..., 2:].contiguous().view(torch.int8)
    return Groups(numbers.unsqueeze(-2), _half(blocks, 0), None)


def _q4_k(blocks: Tensor) -> Groups:
    scales, offsets = _six_bit_scales(blocks)
    return Groups(_nibbles(blocks[..., 16:], 32), scales, offsets)


def _q5_k(blocks: Tensor) -> Groups:
    scales, offsets = _six_bit_scales(blocks)
    fifth = _bits(blocks[..., 16:48], 1) << 4
    return Groups(_nibbles(blocks[..., 48:], 32) | fifth, scales, offsets)


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and offsets a block, from two float16 and twelve bytes:

    bytes 0-3    the low 6 bits: scales 0-3    the high 2: bits 4-5 of scales 4-7
    bytes 4-7    the low 6 bits: minima 0-3    the high 2: bits 4-5 of minima 4-7
    bytes 8-11   the low 4 bits: scales 4-7    the high 4: minima 4-7
    """
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Groups:
    # Runs of 64 bytes of low halves belong with 32 bytes of four fields of high bits.
    low = _nibbles(blocks[..., :128], 64).flatten(-2)
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32), 2)
    numbers = (low | high.flatten(-3) << 4).view(torch.int8) - 32
    scales = _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8)
    return Groups(numbers.view(*blocks.shape[:-1], 16, 16), scales, None)


def _mxfp4(blocks: Tensor) -> Groups:
    """Numbers twice those of the codes; scales of powers of two, a byte with a bias of 127."""
    numbers = torch.tensor(E2M1_NUMBERS, dtype=torch.int8, device=blocks.device)
    exponents = blocks[..., :1].int() - (127 + 1)
    scales = torch.ldexp(torch.ones(exponents.shape, device=blocks.device), exponents)
    return Groups(numbers[_mxfp4_codes(blocks).long()].unsqueeze(-2), scales, None)


def _mxfp4_codes(blocks: Tensor) -> Tensor:
    """[..., 32] of 0 to 15."""
    return _nibbles(blocks[..., 1:], 16).flatten(-2)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNPACKERS: dict[str, Callable[[Tensor], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
