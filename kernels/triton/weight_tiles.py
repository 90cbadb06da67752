"""The inner loop of products with a weight, dense (`quantized_linear`) and grouped (`experts`): a
tile of the weight's rows by a tile of tokens, in floats, in 8 or in 4 bits.

Products are transposed: the weight's rows are the rows of the product (64 a warp group on Hopper),
whose left operand may come from registers, where the numbers have just been converted; the tokens
are its columns, which may be as few as 16. So a decode step reads each weight once, and wastes
little of the product.

    acc[row, token]  +=  scale[row, group] * sum over the group of number * x      (float32)
    acc[row, token]  +=  offset[row, group] * sum over the group of x

Numbers are exact in every floating type, so only x is rounded, as in any product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..ops import Weight
from ..quantized_tensors import QuantizedWeight
from ..reference.quantized import rounds_activations, signed_numbers
from .language import tl, triton

MAX_BLOCK_K = 128
_MIN_GROUP_OF_4_BITS = 32  # a product needs 16 inputs or more; shorter groups use a byte a number


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A weight as the loop reads it; of a stack [num_experts, rows, width] all rows of an expert
    after those of the previous one. 4-bit numbers are stored in the order in which a block's halves
    are read."""

    values: Tensor
    scales: Tensor | None  # float32, a group's [rows, groups]; None: the values are floats
    offsets: Tensor | None  # as scales
    num_rows: int  # of one expert
    width: int
    bits: int  # of a number; of a float 16 or 32
    group: int  # inputs that have one scale
    block_k: int | None  # inputs per iteration of a program; None: any number
    rounds_rows: bool  # tokens are rounded to 8 bits and multiplied as integers
    is_fp4: bool = False  # 4 bits are the code of a float, see `QuantizedWeight.codes`

    @classmethod
    def of(cls, weight: Weight) -> TiledWeight:
        if isinstance(weight, Tensor):
            *_, num_rows, width = weight.shape
            bits = 8 * weight.element_size()
            return cls(weight.contiguous(), None, None, num_rows, width, bits, width, None, False)
        has_row_scales = weight.group_size == weight.in_features and weight.offsets is None
        rounds_rows = rounds_activations(weight) and has_row_scales
        if weight.bits == 4 and weight.group_size < _MIN_GROUP_OF_4_BITS:
            weight = replace(weight, bits=8, values=signed_numbers(weight), codes="integer")
        block_k, offsets = _block_k(weight), weight.offsets
        values = weight.values.contiguous()
        return cls(
            values if weight.bits == 8 else _in_halves(values, block_k),
            weight.scales.to(torch.float32).contiguous(),
            None if offsets is None else offsets.to(torch.float32).contiguous(),
            weight.out_features,
            weight.in_features,
            weight.bits,
            weight.group_size,
            block_k,
            rounds_rows,
            weight.codes == "fp4",
        )


def _block_k(weight: QuantizedWeight) -> int:
    """A group, or a part of one."""
    if weight.group_size == weight.in_features:
        return MAX_BLOCK_K
    assert weight.group_size <= MAX_BLOCK_K or weight.group_size % MAX_BLOCK_K == 0
    return min(weight.group_size, MAX_BLOCK_K)


def _in_halves(values: Tensor, block_k: int) -> Tensor:
    """[..., N, K / 2] uint8, neighbours a byte -> the same size, block after block of `block_k`
    inputs: the first half of a block in the low bits, the second in the high ones. The last block
    of a row is padded with numbers 0."""
    if values.dim() > 2:  # one expert after the other, which needs less memory at a time
        num_bytes = triton.cdiv(2 * values.shape[-1], block_k) * block_k // 2
        halves = values.new_empty(*values.shape[:-1], num_bytes)
        for own, source in zip(halves, values, strict=True):
            own.copy_(_in_halves(source, block_k))
        return halves
    numbers = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    missing = -numbers.shape[1] % block_k
    if missing:
        numbers = torch.nn.functional.pad(numbers, (0, missing), value=8)
    low, high = numbers.view(len(values), -1, 2, block_k // 2).unbind(2)
    return (low | high << 4).view(len(values), -1)


@triton.jit
def row_sums(
    x_at, is_token, values, scales, offsets, rows, first_block, last_block,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, IS_FP4: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_M] float32: `rows` (int64) of the weight times the tokens at x_at, over
    blocks of BLOCK_K inputs. Tokens outside `is_token` count as zeros."""
    NUM_BLOCKS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    NUM_GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    IS_EVEN: tl.constexpr = WIDTH % BLOCK_K == 0
    IS_BY_ROW: tl.constexpr = GROUP == WIDTH
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    x_sum = tl.zeros([BLOCK_M], tl.float32)
    for block in range(first_block, last_block):
        start = block * BLOCK_K
        part = acc if IS_BY_ROW else tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        if BITS == 4:
            HALF: tl.constexpr = BLOCK_K // 2
            byte = block * HALF + tl.arange(0, HALF)
            row = values + rows * (NUM_BLOCKS * HALF)
            k = start + tl.arange(0, HALF)
            low, part = _take(x_at, row, byte, k, part, is_token, IS_EVEN, WIDTH, 0, 4, IS_FP4)
            high, part = _take(
                x_at, row, byte, k + HALF, part, is_token, IS_EVEN, WIDTH, 4, 4, IS_FP4
            )
            total = tl.sum(low.to(tl.float32), axis=0) + tl.sum(high.to(tl.float32), axis=0)
        else:
            k = start + tl.arange(0, BLOCK_K)
            row = values + rows * WIDTH
            inputs, part = _take(x_at, row, k, k, part, is_token, IS_EVEN, WIDTH, 0, BITS, False)
            total = tl.sum(inputs.to(tl.float32), axis=0)
        if IS_BY_ROW:
            acc = part
            x_sum += total
        else:
            group = rows * NUM_GROUPS + start // GROUP
            acc += part * tl.load(scales + group)[:, None]
            if offsets is not None:
                acc += tl.load(offsets + group)[:, None] * total[None, :]
    if IS_BY_ROW and scales is not None:
        acc *= tl.load(scales + rows)[:, None]
        if offsets is not None:
            acc += tl.load(offsets + rows)[:, None] * x_sum[None, :]
    return acc


@triton.jit
def _take(x_at, row, at, k, part, is_token, IS_EVEN: tl.constexpr, WIDTH: tl.constexpr,
          SHIFT: tl.constexpr, BITS: tl.constexpr, IS_FP4: tl.constexpr):  # fmt: skip
    """The inputs k of all tokens, [k, tokens], and `part` plus their products: numbers at row[at],
    4-bit ones from bit SHIFT on."""
    if IS_EVEN:
        inputs = tl.load(x_at[None, :] + k[:, None], mask=is_token[None, :], other=0.0)
    else:
        is_inside = is_token[None, :] & (k < WIDTH)[:, None]
        inputs = tl.load(x_at[None, :] + k[:, None], mask=is_inside, other=0.0)
    if BITS == 4:
        numbers = ((tl.load(row[:, None] + at[None, :]) >> SHIFT) & 15).to(tl.int8)
        if IS_FP4:
            size = numbers & 7  # 0 1 2 3 4 5 6 7 stand for 0 1 2 3 4 6 8 12
            size = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
            numbers = tl.where(numbers < 8, size, -size)
        else:
            numbers -= 8
    elif IS_EVEN:
        numbers = tl.load(row[:, None] + at[None, :])
    else:
        numbers = tl.load(row[:, None] + at[None, :], mask=(k < WIDTH)[None, :], other=0)
    part = tl.dot(numbers.to(inputs.dtype), inputs, part, input_precision="ieee")
    return inputs, part


@triton.jit
def integer_sums(
    x_at, is_token, values, scales, rows,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for 8-bit tokens, by integers, with the weight's scales; without the tokens'."""
    k = tl.arange(0, BLOCK_K)
    value_at = values + rows[:, None] * WIDTH + k[None, :]
    number_at = x_at[None, :] + k[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    for start in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            left = tl.load(value_at + start)
            right = tl.load(number_at + start, mask=is_token[None, :], other=0)
        else:
            is_k = start + k < WIDTH
            left = tl.load(value_at + start, mask=is_k[None, :], other=0)
            right = tl.load(number_at + start, mask=is_token[None, :] & is_k[:, None], other=0)
        acc = tl.dot(left, right, acc, out_dtype=tl.int32)
    return acc.to(tl.float32) * tl.load(scales + rows)[:, None]
