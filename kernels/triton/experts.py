"""A mixture of experts as grouped matrix products: four launches, no synchronisation.

    sort      token-expert pairs by expert, in blocks of at most BLOCK_M (`expert_blocks`)
    gate_up   hidden = activation(x gate.T) * (x up.T), one program a block and BLOCK_N columns
    down      results = hidden down.T, likewise, written to each pair's own place
    combine   out = sum over k of weight k * result k, float32, in the order of k

Of the experts that nobody chose nothing is read. With few pairs an expert, tiles are 16 rows high
and stream each chosen expert's weights once; with many, 64 or 128 rows high (wgmma on Hopper).
Products of 16-bit numbers are summed in float32; those of float32 are float32 products throughout.
There are no atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import Activation, Experts
from .dense import ACTIVATIONS, activate
from .expert_blocks import ExpertBlocks, make_blocks
from .language import tl, triton

_GROUP_M = 8  # blocks that follow each other on the same columns, which they find in the L2 cache


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut; `block_n` counts columns of the result."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Both products take the same blocks of pairs: one `block_m`."""

    gate_up: Tile
    down: Tile


_FEW = Tiles(Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4))
_SOME = Tiles(Tile(64, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4))
_MANY = Tiles(Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4))
_FEW_FLOAT32 = Tiles(Tile(16, 32, 64, 4, 3), Tile(16, 64, 64, 4, 3))
_MANY_FLOAT32 = Tiles(Tile(64, 32, 32, 8, 3), Tile(64, 64, 32, 8, 3))


def choose_tiles(dtype: torch.dtype, num_pairs: int, num_experts: int) -> Tiles:
    """By the pairs that an expert gets on average: shapes only, so that a graph can be captured."""
    if dtype is torch.float32:
        return _FEW_FLOAT32 if num_pairs <= 24 * num_experts else _MANY_FLOAT32
    if num_pairs <= 24 * num_experts:
        return _FEW
    return _SOME if num_pairs <= 160 * num_experts else _MANY


def make_experts(gate_up: Tensor, down: Tensor, activation: Activation) -> Experts:
    gate_up, down = gate_up.contiguous(), down.contiguous()

    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        x, expert_ids = x.contiguous(), expert_ids.contiguous()
        tiles = choose_tiles(x.dtype, expert_ids.numel(), len(down))
        blocks = make_blocks(expert_ids, len(down), tiles.gate_up.block_m)
        top_k = expert_ids.shape[1]
        hidden = _gate_up(x, gate_up, blocks, top_k, activation, tiles.gate_up)
        results = _down(hidden, down, blocks, tiles.down)
        return _combine(results.view(*expert_ids.shape, x.shape[1]), weights)

    return experts


def _gate_up(
    x: Tensor, weight: Tensor, blocks: ExpertBlocks, top_k: int, activation: Activation, tile: Tile
) -> Tensor:
    """x [T, H], weight [E, 2 * I, H] -> [T * K, I], in the order of `blocks.pairs`."""
    num_columns, width = weight.shape[1] // 2, weight.shape[2]
    hidden = x.new_empty(len(blocks.pairs), num_columns)
    _gate_up_kernel[(blocks.max_blocks * triton.cdiv(num_columns, tile.block_n),)](
        x,
        weight,
        hidden,
        blocks.pairs,
        blocks.blocks,
        blocks.num_blocks,
        blocks.max_blocks,
        TOP_K=top_k,
        COLUMNS=num_columns,
        WIDTH=width,
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=_GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return hidden


def _down(hidden: Tensor, weight: Tensor, blocks: ExpertBlocks, tile: Tile) -> Tensor:
    """hidden [T * K, I] in the order of `blocks.pairs`, weight [E, H, I] -> [T * K, H] in the order
    of the pairs themselves."""
    num_columns, width = weight.shape[1:]
    results = hidden.new_empty(len(hidden), num_columns)
    _down_kernel[(blocks.max_blocks * triton.cdiv(num_columns, tile.block_n),)](
        hidden,
        weight,
        results,
        blocks.pairs,
        blocks.blocks,
        blocks.num_blocks,
        blocks.max_blocks,
        COLUMNS=num_columns,
        WIDTH=width,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=_GROUP_M,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return results


def _combine(results: Tensor, weights: Tensor) -> Tensor:
    """results [T, K, H], weights [T, K] -> [T, H]."""
    num_tokens, top_k, width = results.shape
    out = results.new_empty(num_tokens, width)
    block = min(1024, triton.next_power_of_2(width))
    _combine_kernel[(num_tokens, triton.cdiv(width, block))](
        results, weights.contiguous(), out, TOP_K=top_k, WIDTH=width, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _tile_of(program, blocks, num_blocks, max_blocks, COLUMNS: tl.constexpr,
             BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    """Expert, first and last row of the block, and columns of a program: GROUP_M blocks go through
    the columns together. Of a block that is not in use, first = last."""
    num_tiles: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    group = program // (GROUP_M * num_tiles)
    group_size = tl.minimum(max_blocks - group * GROUP_M, GROUP_M)
    block = group * GROUP_M + program % (GROUP_M * num_tiles) % group_size
    columns = program % (GROUP_M * num_tiles) // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    is_used = block < tl.load(num_blocks)
    expert = tl.load(blocks + block * 3, mask=is_used, other=0)
    first = tl.load(blocks + block * 3 + 1, mask=is_used, other=0)
    last = tl.load(blocks + block * 3 + 2, mask=is_used, other=0)
    return expert, first, last, columns


@triton.jit(do_not_specialize=["max_blocks"])
def _gate_up_kernel(
    x,
    weight,
    hidden,
    pairs,
    blocks,
    num_blocks,
    max_blocks,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] of the gates and as much of the ups, over the same rows of x."""
    expert, first, last, columns = _tile_of(
        tl.program_id(0), blocks, num_blocks, max_blocks, COLUMNS, BLOCK_N, GROUP_M
    )
    if first < last:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < last
        tokens = tl.load(pairs + rows, mask=is_row, other=0) // TOP_K
        k = tl.arange(0, BLOCK_K)
        # Columns past the last are read from the first ones again and never stored.
        from_row = (columns % COLUMNS)[None, :] * WIDTH + k[:, None]
        x_tile = x + tokens.to(tl.int64)[:, None] * WIDTH + k[None, :]
        gate_tile = weight + expert.to(tl.int64) * (2 * COLUMNS * WIDTH) + from_row
        up_tile = gate_tile + COLUMNS * WIDTH
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            if WIDTH % BLOCK_K == 0:
                a = tl.load(x_tile + start, mask=is_row[:, None], other=0.0)
                gate_b = tl.load(gate_tile + start)
                up_b = tl.load(up_tile + start)
            else:
                is_k = start + k < WIDTH
                a = tl.load(x_tile + start, mask=is_row[:, None] & is_k[None, :], other=0.0)
                gate_b = tl.load(gate_tile + start, mask=is_k[:, None], other=0.0)
                up_b = tl.load(up_tile + start, mask=is_k[:, None], other=0.0)
            gate = tl.dot(a, gate_b, gate, input_precision="ieee")
            up = tl.dot(a, up_b, up, input_precision="ieee")
        product = activate(gate, ACTIVATION) * up
        at = hidden + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        is_stored = is_row[:, None] & (columns < COLUMNS)[None, :]
        tl.store(at, product.to(hidden.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["max_blocks"])
def _down_kernel(
    hidden,
    weight,
    results,
    pairs,
    blocks,
    num_blocks,
    max_blocks,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] of the results; rows in, sorted, lie side by side, rows out do not."""
    expert, first, last, columns = _tile_of(
        tl.program_id(0), blocks, num_blocks, max_blocks, COLUMNS, BLOCK_N, GROUP_M
    )
    if first < last:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < last
        k = tl.arange(0, BLOCK_K)
        hidden_tile = hidden + rows.to(tl.int64)[:, None] * WIDTH + k[None, :]
        weight_tile = weight + expert.to(tl.int64) * (COLUMNS * WIDTH)
        weight_tile += (columns % COLUMNS)[None, :] * WIDTH + k[:, None]
        result = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            if WIDTH % BLOCK_K == 0:
                a = tl.load(hidden_tile + start, mask=is_row[:, None], other=0.0)
                b = tl.load(weight_tile + start)
            else:
                is_k = start + k < WIDTH
                a = tl.load(hidden_tile + start, mask=is_row[:, None] & is_k[None, :], other=0.0)
                b = tl.load(weight_tile + start, mask=is_k[:, None], other=0.0)
            result = tl.dot(a, b, result, input_precision="ieee")
        own = tl.load(pairs + rows, mask=is_row, other=0).to(tl.int64)
        at = results + own[:, None] * COLUMNS + columns[None, :]
        is_stored = is_row[:, None] & (columns < COLUMNS)[None, :]
        tl.store(at, result.to(results.dtype.element_ty), mask=is_stored)


@triton.jit
def _combine_kernel(
    results, weights, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One token's BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        pair = token * TOP_K + k
        result = tl.load(results + pair * WIDTH + columns, mask=is_column, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * WIDTH + columns, total.to(out.dtype.element_ty), mask=is_column)
