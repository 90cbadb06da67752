"""Low-rank adapters on a GPU: two launches a linear layer, whatever mix of adapters a step has.

Tokens are sorted by adapter on the host and split into blocks of at most BLOCK_M of one adapter,
like S-LoRA's MBGMM (Sheng et al. 2023, section 5.3); a block of one token is Punica's SGMV for
decoding (Chen et al. 2023, section 4). Each block's tokens are data, so that a captured graph
serves any mix: the grid has the worst-case size, and programs of unused blocks return.

    shrink    partial[split, row, n * R] = x[token, split's inputs] A.T, float32
    expand    y[token, columns] += sum over splits of partial[.., the columns' module] B.T

A decode step has few blocks and A is long and thin, so its inputs are split among programs; the
partial sums are added in order, without atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ops import DeviceArrays, DevicePlan, Lora
from .expert_blocks import max_blocks
from .language import tl, triton

_DECODE_TOKENS = 64  # steps of up to this have small blocks, and their inputs are split (guess)
_SPLIT_INPUTS = 512  # inputs a program, at least, if they are split (guess)
_MAX_SPLITS = 8
_BLOCK_K = 64
_BLOCK_RANKS = 64  # of A a program, and of B at a time, at most
_BLOCK_RANKS_FLOAT32 = 16  # of B
_BLOCK_N = 128  # columns of y a program
_BLOCK_N_FLOAT32 = 32  # whose products are made of fused multiply-adds, in registers


@dataclass(frozen=True, slots=True)
class LoraBlocks:
    """A bound plan, all on the device."""

    tokens: Tensor  # [P] int32: those with an adapter, sorted by adapter
    blocks: Tensor  # [max_blocks, 3] int32: index of the slot, first, last (exclusive) in `tokens`
    block_m: int
    is_split: bool


def plan_lora(
    slots: npt.NDArray[np.int32], num_slots: int, padded_tokens: int | None = None
) -> DevicePlan:
    size = len(slots) if padded_tokens is None else padded_tokens
    is_split = size <= _DECODE_TOKENS
    block_m = 16 if is_split else 64
    order = np.argsort(slots, kind="stable").astype(np.int32)
    order = order[int((slots == 0).sum()) :]
    tokens = np.zeros(size, dtype=np.int32)
    tokens[: len(order)] = order
    blocks = np.zeros((max_blocks(size, num_slots, block_m), 3), dtype=np.int32)
    found = _blocks(slots[order], block_m)
    blocks[: len(found)] = found

    def bind(arrays: DeviceArrays, page_table: Tensor) -> LoraBlocks:
        return LoraBlocks(arrays["tokens"], arrays["blocks"], block_m, is_split)

    return DevicePlan({"tokens": tokens, "blocks": blocks}, bind)


def _blocks(slots: npt.NDArray[np.int32], block_m: int) -> npt.NDArray[np.int32]:
    """slots: sorted, all above 0 -> [num_blocks, 3], see LoraBlocks."""
    used, firsts, counts = np.unique(slots, return_index=True, return_counts=True)
    blocks = [
        (slot - 1, first + start, first + min(start + block_m, count))
        for slot, first, count in zip(used.tolist(), firsts.tolist(), counts.tolist())
        for start in range(0, count, block_m)
    ]
    return np.array(blocks, dtype=np.int32).reshape(-1, 3)


def make_lora(a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
    num_ranks, num_inputs = a.shape[1:]
    num_outputs, max_rank = b.shape[1:]
    is_float32 = a.dtype is torch.float32
    block_n = _BLOCK_N_FLOAT32 if is_float32 else _BLOCK_N
    most_ranks = _BLOCK_RANKS_FLOAT32 if is_float32 else _BLOCK_RANKS
    tiles = torch.tensor(_tiles(out_features, block_n), dtype=torch.int32).to(a.device)
    block_ranks = min(_BLOCK_RANKS, max(16, triton.next_power_of_2(num_ranks)))
    num_rank_tiles = triton.cdiv(num_ranks, block_ranks)
    num_splits = min(_MAX_SPLITS, triton.cdiv(num_inputs, _SPLIT_INPUTS))

    def lora(x: Tensor, y: Tensor, plan: object) -> None:
        assert isinstance(plan, LoraBlocks), "a plan of this backend"
        assert x.is_contiguous() and y.is_contiguous()
        splits = num_splits if plan.is_split else 1
        partial = x.new_empty((splits, len(plan.tokens), num_ranks), dtype=torch.float32)
        _shrink[(len(plan.blocks), num_rank_tiles, splits)](
            x,
            a,
            partial,
            plan.tokens,
            plan.blocks,
            len(plan.tokens),
            RANKS=num_ranks,
            INPUTS=num_inputs,
            SPLIT=triton.cdiv(triton.cdiv(num_inputs, splits), _BLOCK_K) * _BLOCK_K,
            BLOCK_M=plan.block_m,
            BLOCK_RANKS=block_ranks,
            BLOCK_K=_BLOCK_K,
            num_warps=4,
            num_stages=4,
        )
        _expand[(len(plan.blocks), len(tiles))](
            partial,
            b,
            y,
            plan.tokens,
            plan.blocks,
            tiles,
            len(plan.tokens),
            NUM_SPLITS=splits,
            RANKS=num_ranks,
            MAX_RANK=max_rank,
            OUTPUTS=num_outputs,
            BLOCK_M=plan.block_m,
            BLOCK_N=block_n,
            BLOCK_RANK=min(most_ranks, max(16, triton.next_power_of_2(max_rank))),
            num_warps=4 if plan.is_split else 8,
        )

    return lora


def _tiles(out_features: Sequence[int], block_n: int) -> list[tuple[int, int, int]]:
    """(module, first column, end) of each program's columns: no tile spans two modules."""
    tiles, first = [], 0
    for module, size in enumerate(out_features):
        end = first + size
        tiles += [(module, at, min(at + block_n, end)) for at in range(first, end, block_n)]
        first = end
    return tiles


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    x,
    a,
    partial,
    tokens,
    blocks,
    num_rows,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_RANKS] over SPLIT inputs a program."""
    block, split = tl.program_id(0), tl.program_id(2)
    slot = tl.load(blocks + block * 3)
    first, last = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    if first < last:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < last
        token = tl.load(tokens + rows, mask=is_row, other=0).to(tl.int64)
        ranks = tl.program_id(1) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
        is_rank = ranks < RANKS
        k = tl.arange(0, BLOCK_K)
        start = split * SPLIT
        x_tile = x + token[:, None] * INPUTS + k[None, :]
        # Ranks after the last are read from the first ones again and never stored.
        a_tile = a + slot.to(tl.int64) * (RANKS * INPUTS)
        a_tile += (ranks % RANKS)[None, :] * INPUTS + k[:, None]
        result = tl.zeros([BLOCK_M, BLOCK_RANKS], tl.float32)
        for at in range(start, min(start + SPLIT, INPUTS), BLOCK_K):
            if INPUTS % BLOCK_K == 0:
                x_part = tl.load(x_tile + at, mask=is_row[:, None], other=0.0)
                a_part = tl.load(a_tile + at)
            else:
                is_k = at + k < INPUTS
                x_part = tl.load(x_tile + at, mask=is_row[:, None] & is_k[None, :], other=0.0)
                a_part = tl.load(a_tile + at, mask=is_k[:, None], other=0.0)
            result = tl.dot(x_part, a_part, result, input_precision="ieee")
        to = partial + (split.to(tl.int64) * num_rows + rows[:, None]) * RANKS + ranks[None, :]
        tl.store(to, result, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    partial,
    b,
    y,
    tokens,
    blocks,
    tiles,
    num_rows,
    NUM_SPLITS: tl.constexpr,
    RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] of y, all of one module, a program."""
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(blocks + block * 3)
    first, last = tl.load(blocks + block * 3 + 1), tl.load(blocks + block * 3 + 2)
    if first < last:
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < last
        module = tl.load(tiles + tile * 3)
        columns = tl.load(tiles + tile * 3 + 1) + tl.arange(0, BLOCK_N)
        is_column = columns < tl.load(tiles + tile * 3 + 2)
        rank = tl.arange(0, BLOCK_RANK)
        at = partial + rows.to(tl.int64)[:, None] * RANKS + module * MAX_RANK + rank[None, :]
        b_tile = b + (slot.to(tl.int64) * OUTPUTS + columns[None, :]) * MAX_RANK + rank[:, None]
        added = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, MAX_RANK, BLOCK_RANK):
            is_rank = start + rank < MAX_RANK
            is_shrunk = is_row[:, None] & is_rank[None, :]
            shrunk = tl.zeros([BLOCK_M, BLOCK_RANK], tl.float32)
            for split in tl.static_range(NUM_SPLITS):
                split_at = at + start + split * num_rows.to(tl.int64) * RANKS
                shrunk += tl.load(split_at, mask=is_shrunk, other=0.0)
            b_part = tl.load(b_tile + start, mask=is_rank[:, None] & is_column[None, :], other=0.0)
            added = tl.dot(shrunk.to(b_part.dtype), b_part, added, input_precision="ieee")
        token = tl.load(tokens + rows, mask=is_row, other=0).to(tl.int64)
        y_tile = y + token[:, None] * OUTPUTS + columns[None, :]
        is_inside = is_row[:, None] & is_column[None, :]
        before = tl.load(y_tile, mask=is_inside, other=0.0)
        tl.store(y_tile, (before.to(tl.float32) + added).to(before.dtype), mask=is_inside)
