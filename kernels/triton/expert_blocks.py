"""The token-expert pairs of each tile of a grouped product: a counting sort on the device.

The pairs (token, k), numbered token * K + k, are sorted by expert, those of an expert in their own
order, and each expert's run is split into blocks of at most `block_m`:

    expert_ids   2 0 2   2 1 2                      (T = 2, K = 3, block_m = 2)
    pairs        1 | 4 | 0 2 | 3 5                  sorted, no padding between experts
    blocks       (0, 0, 1) (1, 1, 2) (2, 2, 4) (2, 4, 6)    (expert, first, last)

Nothing waits for the device: the arrays have the worst-case size, the grid starts that many
programs, and those after `num_blocks` return at once.

One program an expert; each counts all pairs itself (a histogram a chunk), which is E times the work
but needs no second launch: E * T * K comparisons, 8 million at 8,192 tokens, 128 experts and K = 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .language import tl, triton

# Pairs processed together, of few pairs and of many: guesses. No more than two, since each is
# compiled.
_CHUNKS = (64, 1024)
_CHUNK_OF_BLOCKS: tl.constexpr = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """All tensors are on the device."""

    pairs: Tensor  # [T * K] int32, sorted by expert; behind those that have one it is not written
    blocks: Tensor  # [max_blocks, 3] int32: expert, first, last (exclusive) in `pairs`
    num_blocks: Tensor  # [1] int32, how many of the blocks are in use

    @property
    def max_blocks(self) -> int:
        return len(self.blocks)


def make_blocks(expert_ids: Tensor, num_experts: int, block_m: int) -> ExpertBlocks:
    """expert_ids [T, K] int64 contiguous, in [0, num_experts), or -1: such pairs are left out."""
    num_pairs = expert_ids.numel()
    most = max_blocks(num_pairs, num_experts, block_m)
    found = ExpertBlocks(
        pairs=expert_ids.new_empty(num_pairs, dtype=torch.int32),
        blocks=expert_ids.new_empty(most, 3, dtype=torch.int32),
        num_blocks=expert_ids.new_empty(1, dtype=torch.int32),
    )
    _sort_pairs[(num_experts,)](
        expert_ids,
        found.pairs,
        found.blocks,
        found.num_blocks,
        num_pairs,
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts),
        BLOCK_M=block_m,
        CHUNK=_CHUNKS[num_pairs > _CHUNKS[0]],
        num_warps=4,
    )
    return found


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that any choice of experts needs: as many experts as possible, each with a
    nearly empty last block."""
    num_started = min(num_pairs, num_experts)
    return num_started + (num_pairs - num_started) // block_m


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs(
    expert_ids,
    pairs,
    blocks,
    num_blocks,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e: finds where e's pairs and blocks begin, then writes them."""
    expert = tl.program_id(0)
    place = tl.arange(0, CHUNK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        is_pair = start + place < num_pairs
        ids = tl.load(expert_ids + start + place, mask=is_pair, other=-1).to(tl.int32)
        counts += tl.histogram(tl.maximum(ids, 0), BINS, mask=ids >= 0)

    experts = tl.arange(0, BINS)
    num_blocks_of = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, counts, 0))
    last = first + tl.sum(tl.where(experts == expert, counts, 0))
    first_block = tl.sum(tl.where(experts < expert, num_blocks_of, 0))
    if expert == NUM_EXPERTS - 1:
        tl.store(num_blocks, tl.sum(num_blocks_of))

    if first < last:
        next_pair = first
        for start in range(0, num_pairs, CHUNK):
            is_pair = start + place < num_pairs
            ids = tl.load(expert_ids + start + place, mask=is_pair, other=-1).to(tl.int32)
            is_own = (ids == expert).to(tl.int32)
            rank = tl.cumsum(is_own, 0) - 1
            tl.store(pairs + next_pair + rank, start + place, mask=is_own != 0)
            next_pair += tl.sum(is_own)
        own_blocks = (last - first + BLOCK_M - 1) // BLOCK_M
        for start in range(0, own_blocks, _CHUNK_OF_BLOCKS):
            block = start + tl.arange(0, _CHUNK_OF_BLOCKS)
            is_block = block < own_blocks
            at = blocks + (first_block + block) * 3
            tl.store(at, expert, mask=is_block)
            tl.store(at + 1, first + block * BLOCK_M, mask=is_block)
            tl.store(at + 2, tl.minimum(first + (block + 1) * BLOCK_M, last), mask=is_block)
