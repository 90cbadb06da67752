"""Linear layers whose weights stay in 8 or 4 bits; numbers become floats in registers.

`weight_tiles` multiplies a tile. Weights with too few rows to fill the device are split along their
inputs; a second kernel sums the parts in order. The split depends on the weight and on whether
there are few tokens: not on the rest of the batch.

With 8-bit activations (W8A8) each token is rounded once, with one scale, and the product is one of
integers, if the weight has one scale a row and no offsets; otherwise inputs are not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..input_order import over_ordered_inputs
from ..ops import OutputLinear
from ..quantized_tensors import QuantizedWeight
from .language import tl, triton
from .weight_tiles import MAX_BLOCK_K, TiledWeight, integer_sums, row_sums

# Programs that fill an H200's 132 multiprocessors twice: the target of splitting for few tokens.
_WANTED_PROGRAMS = 264
_MAX_SPLITS = 8
_FEW_TOKENS = 64  # up to this, reading the weights dominates the time
_ROUND_ROWS_BLOCK = 1024
_SMALLEST_PEAK: tl.constexpr = tl.constexpr(1e-30)  # of reference/quantized.py


@dataclass(frozen=True, slots=True)
class Tile:
    """Weight rows (block_n) by tokens (block_m) of a program."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int


_FEW = Tile(64, 16, 4, 4)
_SOME = Tile(64, 64, 4, 4)
_MANY = Tile(128, 128, 8, 3)
_MANY_FLOAT32 = Tile(64, 32, 8, 2)


def choose_tile(num_tokens: int, dtype: torch.dtype) -> Tile:
    """Chosen by the number of tokens alone."""
    if num_tokens <= 16:
        return _FEW
    if num_tokens <= _FEW_TOKENS:
        return _SOME
    return _MANY_FLOAT32 if dtype is torch.float32 else _MANY


def make_linear(
    weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype | None = None
) -> OutputLinear:
    """A product in `dtype`, None for its input's."""
    if weight.input_order is not None:
        return over_ordered_inputs(weight, lambda plain: make_linear(plain, bias, dtype))
    tiled = TiledWeight.of(weight)
    return (_IntegerLinear if tiled.rounds_rows else _WeightOnlyLinear)(tiled, bias, dtype)


class _WeightOnlyLinear:
    """Products of unrounded tokens; owns the weight."""

    def __init__(self, weight: TiledWeight, bias: Tensor | None, dtype: torch.dtype | None) -> None:
        assert weight.block_k is not None, "its values are no floats"
        self._weight, self._bias, self._dtype = weight, bias, dtype
        self._block_k = weight.block_k

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x, weight = x.contiguous(), self._weight
        num_tokens = len(x)
        if out is None:
            out = x.new_empty(num_tokens, weight.num_rows, dtype=self._dtype or x.dtype)
        if not num_tokens:
            return out
        tile = choose_tile(num_tokens, x.dtype)
        splits = self._splits() if num_tokens <= _FEW_TOKENS else 1
        parts = out if splits == 1 else x.new_empty(splits, *out.shape, dtype=torch.float32)
        _weight_only[
            (triton.cdiv(weight.num_rows, tile.block_n), triton.cdiv(num_tokens, tile.block_m),
             splits)
        ](
            x, weight.values, weight.scales, weight.offsets, self._bias, parts, num_tokens,
            ROWS=weight.num_rows, WIDTH=weight.width, GROUP=weight.group, BITS=weight.bits,
            IS_FP4=weight.is_fp4, SPLITS=splits, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
            BLOCK_K=self._block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        if splits > 1:
            _sum_parts_into(out, parts, self._bias)
        return out

    def _splits(self) -> int:
        """For few tokens: depends on the weight's shape alone."""
        num_blocks: int = triton.cdiv(self._weight.width, self._block_k)
        wanted: int = _WANTED_PROGRAMS // triton.cdiv(self._weight.num_rows, _FEW.block_n)
        return max(1, min(wanted, _MAX_SPLITS, num_blocks // 4))


class _IntegerLinear:
    """Integer products of rounded activations; owns the weight."""

    def __init__(self, weight: TiledWeight, bias: Tensor | None, dtype: torch.dtype | None) -> None:
        self._weight, self._bias, self._dtype = weight, bias, dtype

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        weight = self._weight
        numbers, x_scales = round_rows(x.contiguous())
        num_tokens = len(x)
        if out is None:
            out = x.new_empty(num_tokens, weight.num_rows, dtype=self._dtype or x.dtype)
        if not num_tokens:
            return out
        tile = choose_tile(num_tokens, x.dtype)
        _integers[
            (triton.cdiv(weight.num_rows, tile.block_n), triton.cdiv(num_tokens, tile.block_m))
        ](
            numbers, x_scales, weight.values, weight.scales, self._bias, out, num_tokens,
            ROWS=weight.num_rows, WIDTH=weight.width, BLOCK_N=tile.block_n, BLOCK_M=tile.block_m,
            BLOCK_K=MAX_BLOCK_K, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] contiguous -> numbers [T, K] int8 and scales [T] float32: by the rule of
    reference/quantized.py; a row with a non-finite value has scale NaN."""
    numbers = torch.empty_like(x, dtype=torch.int8)
    scales = x.new_empty(len(x), dtype=torch.float32)
    if x.numel():
        _round_rows[(len(x),)](
            x, numbers, scales, WIDTH=x.shape[1],
            BLOCK=min(_ROUND_ROWS_BLOCK, triton.next_power_of_2(x.shape[1])), num_warps=4,
        )  # fmt: skip
    return numbers, scales


def _sum_parts_into(out: Tensor, parts: Tensor, bias: Tensor | None) -> None:
    """parts [S, T, N] float32 -> out [T, N]."""
    splits, num_tokens, num_rows = parts.shape
    block = min(1024, triton.next_power_of_2(num_rows))
    _sum_parts[(num_tokens, triton.cdiv(num_rows, block))](
        parts, bias, out, num_tokens, SPLITS=splits, ROWS=num_rows, BLOCK=block, num_warps=4
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _weight_only(
    x, values, scales, offsets, bias, out, num_tokens,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    IS_FP4: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N weight rows, BLOCK_M tokens] over a split of the inputs."""
    NUM_BLOCKS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    is_token = tokens < num_tokens
    # Rows after the last are read from the first ones again and never stored.
    own = (rows % ROWS).to(tl.int64)
    acc = row_sums(
        x + tokens.to(tl.int64) * WIDTH, is_token, values, scales, offsets, own,
        NUM_BLOCKS * split // SPLITS, NUM_BLOCKS * (split + 1) // SPLITS,
        WIDTH, GROUP, BITS, IS_FP4, BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    if SPLITS == 1 and bias is not None:
        acc += tl.load(bias + own).to(tl.float32)[:, None]
    at = (split * num_tokens + tokens).to(tl.int64)[None, :] * ROWS + rows[:, None]
    is_stored = is_token[None, :] & (rows < ROWS)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_tokens"])
def _integers(
    numbers, x_scales, values, scales, bias, out, num_tokens,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N weight rows, BLOCK_M tokens] of integer products."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token = tokens < num_tokens
    own = (rows % ROWS).to(tl.int64)
    result = integer_sums(
        numbers + tokens.to(tl.int64) * WIDTH, is_token, values, scales, own,
        WIDTH, BLOCK_N, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    result *= tl.load(x_scales + tokens, mask=is_token, other=0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + own).to(tl.float32)[:, None]
    at = tokens.to(tl.int64)[None, :] * ROWS + rows[:, None]
    is_stored = is_token[None, :] & (rows < ROWS)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _round_rows(x, numbers, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One token, in two passes."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        is_inside = start + columns < WIDTH
        value = tl.load(x + token * WIDTH + start + columns, mask=is_inside, other=0.0)
        value = tl.abs(value.to(tl.float32))
        # NaN counts as infinity, so that no comparison misses it.
        largest = tl.maximum(largest, tl.where(value == value, value, float("inf")))
    limit = tl.maximum(tl.max(largest), _SMALLEST_PEAK)
    is_finite = limit < float("inf")
    inverse = tl.where(is_finite, 127.0 / limit, 0.0)
    tl.store(scales + token, tl.where(is_finite, limit / 127.0, float("nan")))
    for start in range(0, WIDTH, BLOCK):
        is_inside = start + columns < WIDTH
        value = tl.load(x + token * WIDTH + start + columns, mask=is_inside, other=0.0)
        number = tl.where(is_finite, value.to(tl.float32) * inverse, 0.0)
        # Adding 1.5 * 2**23 leaves no bits for a fraction: rounds to the nearest, ties to even.
        rounded = (number + 12582912.0) - 12582912.0
        tl.store(numbers + token * WIDTH + start + columns, rounded.to(tl.int8), mask=is_inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_parts(parts, bias, out, num_tokens, SPLITS: tl.constexpr, ROWS: tl.constexpr,
               BLOCK: tl.constexpr):  # fmt: skip
    """BLOCK results of one token, in the order of the splits."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < ROWS
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (split * num_tokens + token) * ROWS + columns
        total += tl.load(at, mask=is_column, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + token * ROWS + columns, total.to(out.dtype.element_ty), mask=is_column)
