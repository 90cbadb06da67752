"""A mixture of experts as grouped matrix products: four launches, no synchronisation.

    sort      token-expert pairs by expert, in blocks of at most BLOCK_M (`expert_blocks`)
    gate_up   hidden = activation(x gate.T) * (x up.T), one program a block and a tile of rows
    down      results = hidden down.T, likewise, written to each pair's own place
    combine   out = sum over k of weight k * result k, float32, in the order of k

The weights of experts without tokens are not read, and nothing is computed of tokens that only pad
a step or of experts that another rank has (ids of -1). Both products are one kernel, for weights in
floats, 8 bits or 4 (`weight_tiles`): the weight's rows are the rows of the product, pairs its
columns. With few pairs an expert, tiles are 16 pairs wide and stream each chosen expert's weights
once; with many, 64 or 128. Sums are float32; products of float32 are float32 throughout. With 8-bit
activations (W8A8) tokens are rounded before either product, as in `quantized_linear`.
There are no atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ..model_options import ClampedSwiGLU
from ..ops import Activation, Experts, Weight
from ..quantized_tensors import QuantizedWeight
from .dense import ACTIVATIONS, activate
from .device_multiprocessor import multiprocessor_of
from .expert_blocks import ExpertBlocks, make_blocks
from .language import tl, triton
from .multiprocessors import Multiprocessor
from .quantized_linear import round_rows
from .weight_tiles import TiledWeight, integer_sums, row_sums

_CLAMPED = tl.constexpr(100)  # beside ACTIVATIONS: ClampedSwiGLU
_GROUP_M = 8  # consecutive blocks on the same rows, which they find in the L2 cache


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of the weight (block_n; for gate_up half gates, half ups) by pairs (block_m), and the
    inputs per iteration if the weight's format leaves that open."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


_FEW = Tile(64, 16, 128, 4, 4)
_SOME = Tile(128, 64, 64, 4, 4)
_MANY = Tile(256, 128, 64, 8, 4)
_FEW_FLOAT32 = Tile(64, 16, 64, 4, 3)
_MANY_FLOAT32 = Tile(64, 64, 32, 8, 3)
_FEW_NUMBERS = Tile(64, 16, 128, 4, 4)
_SOME_NUMBERS = Tile(64, 64, 128, 4, 4)
_MANY_NUMBERS = Tile(128, 128, 128, 8, 3)
_MANY_NUMBERS_FLOAT32 = Tile(32, 64, 128, 8, 2)


def choose_tile(
    dtype: torch.dtype,
    num_pairs: int,
    num_experts: int,
    multiprocessor: Multiprocessor,
    *,
    is_float: bool,
) -> Tile:
    """Chosen by the average pairs per expert: from shapes only, so that a graph can be captured.
    Float and quantized weights have the same `block_m`. Loads are as far ahead as shared memory
    allows."""
    tile = _tile(dtype, num_pairs, num_experts, is_float=is_float)
    taken = (tile.block_n + tile.block_m) * tile.block_k * dtype.itemsize  # of a stage
    most = multiprocessor.block_shared_bytes // taken + 1
    return replace(tile, num_stages=min(tile.num_stages, most)) if is_float else tile


def _tile(dtype: torch.dtype, num_pairs: int, num_experts: int, *, is_float: bool) -> Tile:
    if num_pairs <= 24 * num_experts:
        if not is_float:
            return _FEW_NUMBERS
        return _FEW_FLOAT32 if dtype is torch.float32 else _FEW
    if dtype is torch.float32:
        return _MANY_FLOAT32 if is_float else _MANY_NUMBERS_FLOAT32
    if num_pairs <= 160 * num_experts:
        return _SOME if is_float else _SOME_NUMBERS
    return _MANY if is_float else _MANY_NUMBERS


def make_experts(
    gate_up: Weight,
    down: Weight,
    activation: Activation | ClampedSwiGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Experts:
    for weight in (gate_up, down):
        if isinstance(weight, QuantizedWeight) and weight.input_order is not None:
            raise ModelLoadError(
                "experts in act-order (GPTQ's desc_act) have no kernels for a GPU: their inputs "
                "would have to be sorted for each expert"
            )
    num_experts = len(gate_up if isinstance(gate_up, Tensor) else gate_up.values)
    up_product = _Product(TiledWeight.of(gate_up), num_experts, gate_up_bias, activation)
    down_product = _Product(TiledWeight.of(down), num_experts, down_bias)

    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        x, expert_ids = x.contiguous(), expert_ids.contiguous()
        block_m = up_product.tile(x.dtype, expert_ids.numel()).block_m
        blocks = make_blocks(expert_ids, num_experts, block_m)
        hidden = up_product(x, blocks, expert_ids.shape[1])
        results = down_product(hidden, blocks)
        return _combine(results.view(*expert_ids.shape, x.shape[1]), expert_ids, weights)

    return experts


class _Product:
    """One of an expert's two products; owns the weights of all experts."""

    def __init__(
        self,
        weight: TiledWeight,
        num_experts: int,
        bias: Tensor | None,
        activation: Activation | ClampedSwiGLU | None = None,
    ) -> None:
        """bias [num_experts, rows]; activation: of gates and ups; None: the plain product."""
        self._weight, self._num_experts = weight, num_experts
        self._bias = None if bias is None else bias.contiguous()
        self._num_columns = weight.num_rows // (1 if activation is None else 2)
        self._clamped = activation if isinstance(activation, ClampedSwiGLU) else ClampedSwiGLU()
        self._activation: tl.constexpr | None = None
        if isinstance(activation, ClampedSwiGLU):
            self._activation = _CLAMPED
        elif activation is not None:
            self._activation = ACTIVATIONS[activation]

    def tile(self, dtype: torch.dtype, num_pairs: int) -> Tile:
        weight = self._weight
        multiprocessor = multiprocessor_of(weight.values.device)
        is_float = weight.scales is None
        return choose_tile(dtype, num_pairs, self._num_experts, multiprocessor, is_float=is_float)

    def __call__(self, x: Tensor, blocks: ExpertBlocks, top_k: int = 1) -> Tensor:
        """Gated: x [T, width] -> [T * K, columns] in the order of `blocks.pairs`. Otherwise x
        [T * K, width] in that order -> [T * K, columns] in the order of the pairs themselves."""
        weight, tile = self._weight, self.tile(x.dtype, len(blocks.pairs))
        out = x.new_empty(len(blocks.pairs), self._num_columns)
        x, x_scales = round_rows(x) if weight.rounds_rows else (x, None)
        num_tiles: int = triton.cdiv(weight.num_rows, tile.block_n)
        _product_kernel[(blocks.max_blocks * num_tiles,)](
            x,
            x_scales,
            weight.values,
            weight.scales,
            weight.offsets,
            self._bias,
            out,
            blocks.pairs,
            blocks.blocks,
            blocks.num_blocks,
            blocks.max_blocks,
            TOP_K=top_k,
            ROWS=weight.num_rows,
            WIDTH=weight.width,
            GROUP=weight.group,
            BITS=weight.bits,
            IS_FP4=weight.is_fp4,
            ACTIVATION=self._activation,
            ALPHA=self._clamped.alpha,
            LIMIT=self._clamped.limit,
            BLOCK_N=tile.block_n,
            BLOCK_M=tile.block_m,
            BLOCK_K=weight.block_k or tile.block_k,
            GROUP_M=_GROUP_M,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


def _combine(results: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """results [T, K, H], expert_ids and weights [T, K] -> [T, H]; there is no result where the id
    is -1."""
    num_tokens, top_k, width = results.shape
    out = results.new_empty(num_tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _combine_kernel[(num_tokens, triton.cdiv(width, block))](
        results,
        expert_ids,
        weights.contiguous(),
        out,
        TOP_K=top_k,
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
    return out


@triton.jit
def _tile_of(program, blocks, num_blocks, max_blocks, NUM_TILES: tl.constexpr,
             GROUP_M: tl.constexpr):  # fmt: skip
    """Expert, first and last pair of the block, and tile of rows of a program: GROUP_M blocks
    iterate over the rows together. An unused block has first = last."""
    group = program // (GROUP_M * NUM_TILES)
    group_size = tl.minimum(max_blocks - group * GROUP_M, GROUP_M)
    block = group * GROUP_M + program % (GROUP_M * NUM_TILES) % group_size
    tile = program % (GROUP_M * NUM_TILES) // group_size
    is_used = block < tl.load(num_blocks)
    expert = tl.load(blocks + block * 3, mask=is_used, other=0)
    first = tl.load(blocks + block * 3 + 1, mask=is_used, other=0)
    last = tl.load(blocks + block * 3 + 2, mask=is_used, other=0)
    return expert, first, last, tile


@triton.jit(do_not_specialize=["max_blocks"])
def _product_kernel(
    x,
    x_scales,
    values,
    scales,
    offsets,
    biases,
    out,
    pairs,
    blocks,
    num_blocks,
    max_blocks,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    IS_FP4: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """[BLOCK_N rows, BLOCK_M pairs] of one expert. With ACTIVATION half of the rows are gates, the
    others the ups of the same columns; pairs' tokens are gathered, and results are sorted like the
    pairs. Without it input rows are sorted, and output rows go to their pair's place."""
    IS_GATED: tl.constexpr = ACTIVATION is not None
    COLUMNS: tl.constexpr = ROWS // 2 if IS_GATED else ROWS
    BLOCK_COLUMNS: tl.constexpr = BLOCK_N // 2 if IS_GATED else BLOCK_N
    NUM_TILES: tl.constexpr = (ROWS + BLOCK_N - 1) // BLOCK_N
    expert, first, last, tile = _tile_of(
        tl.program_id(0), blocks, num_blocks, max_blocks, NUM_TILES, GROUP_M
    )
    if first < last:
        place = first + tl.arange(0, BLOCK_M)
        is_pair = place < last
        pair = tl.load(pairs + place, mask=is_pair, other=0)
        source = pair // TOP_K if IS_GATED else place
        target = place if IS_GATED else pair
        n = tl.arange(0, BLOCK_N)
        # Columns after the last are read from the first ones again and never stored.
        rows = (tile * BLOCK_COLUMNS + n % BLOCK_COLUMNS) % COLUMNS + n // BLOCK_COLUMNS * COLUMNS
        own = expert.to(tl.int64) * ROWS + rows
        x_at = x + source.to(tl.int64) * WIDTH
        if x_scales is None:
            result = row_sums(
                x_at, is_pair, values, scales, offsets, own, 0, (WIDTH + BLOCK_K - 1) // BLOCK_K,
                WIDTH, GROUP, BITS, IS_FP4, BLOCK_N, BLOCK_M, BLOCK_K,
            )  # fmt: skip
        else:
            result = integer_sums(
                x_at, is_pair, values, scales, own, WIDTH, BLOCK_N, BLOCK_M, BLOCK_K
            )
            result *= tl.load(x_scales + source, mask=is_pair, other=0.0)[None, :]
        if biases is not None:
            result += tl.load(biases + own).to(tl.float32)[:, None]
        if IS_GATED:
            halves = tl.permute(tl.reshape(result, [2, BLOCK_COLUMNS, BLOCK_M]), [1, 2, 0])
            gate, up = tl.split(halves)
            if ACTIVATION == _CLAMPED:  # by comparisons, which keep a NaN
                gate = tl.where(gate > LIMIT, LIMIT, gate)
                up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
                result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
            else:
                result = activate(gate, ACTIVATION) * up
        columns = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        at = out + target.to(tl.int64)[None, :] * COLUMNS + columns[:, None]
        is_stored = is_pair[None, :] & (columns < COLUMNS)[:, None]
        tl.store(at, result.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _combine_kernel(
    results, expert_ids, weights, out,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        is_own = is_column & (tl.load(expert_ids + pair) >= 0)
        result = tl.load(results + pair * WIDTH + columns, mask=is_own, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=is_column)
