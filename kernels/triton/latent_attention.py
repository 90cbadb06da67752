"""Latent attention (DeepSeek-V2, section 2.1, absorbed) of a whole step, by `work_list`.

    tile     BLOCK_M rows (query tokens by heads) against BLOCK_N rows of KV at a time
    narrow   the heads of one decoding token, 16 to 64; bound by the bandwidth of KV while the heads
             are few: a row of KV is 576 numbers and 2,176 operations a head
    wide     prompt chunks and segments, 64 rows

To the work list this is attention with one KV head, whose group is all heads. A block of KV is
copied to shared memory once and read there twice: latent and rotated key for the scores, the latent
again as the value. If there are more heads than a tile has rows, several programs share them, and
read the KV from the second-level cache. Softmax, parts and merge are those of `paged_attention`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..ops import DeviceArrays, DevicePlan
from . import work_list
from .attention_tiles import Tile, padded_head_dim, residing
from .device_multiprocessor import multiprocessor_of
from .language import tl, triton
from .merge import merge_partials, num_programs
from .multiprocessors import Multiprocessor
from .work_list import AttentionShape, plan_work

# A row's cost of being in a segment, in tokens of KV. A partial result of 16 heads is 16 * 512
# numbers of float32, written and read, as much as 57 tokens of 576 numbers of 2 bytes, and a lone
# segment has some 8 parts. Counted, not measured; with 128 heads arithmetic dominates, of which a
# segment saves none.
SEGMENT_COST_TOKENS = 512
_LOG2_E = math.log2(math.e)
# Below every score, and finite: the difference of two of them is 0 and not NaN.
_LOWEST = tl.constexpr(-1e38)
_TOKEN = tl.constexpr(work_list.TOKEN)
_NUM_TOKENS = tl.constexpr(work_list.NUM_TOKENS)
_TABLE_ROW = tl.constexpr(work_list.TABLE_ROW)
_FIRST_KEY = tl.constexpr(work_list.FIRST_KEY)
_END_KEY = tl.constexpr(work_list.END_KEY)
_POSITION = tl.constexpr(work_list.POSITION)
_FIRST_PART = tl.constexpr(work_list.FIRST_PART)
_PART_KEYS = tl.constexpr(work_list.PART_KEYS)
_FIRST_ITEM = tl.constexpr(work_list.FIRST_ITEM)


@dataclass(frozen=True, slots=True)
class TritonLatentPlan:
    """A step's work list on the device, and the constants of all steps."""

    lists: DeviceArrays  # WorkList.arrays
    page_table: Tensor  # [max_running_requests, max_pages] int32
    page_size: int
    scale: float
    max_partials: int


def store_latent(latent: Tensor, kv_layer: Tensor, slots: Tensor) -> None:
    assert latent.stride(1) == 1 and kv_layer.is_contiguous()
    size = kv_layer.shape[1]
    _store_latent[(len(latent),)](
        latent, kv_layer, slots, latent.stride(0),
        SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=2,
    )  # fmt: skip


def plan_latent_attention(
    rows: AttentionRows,
    kv_layer: Tensor,
    num_heads: int,
    scale: float,
    padded_tokens: int | None = None,
) -> DevicePlan:
    sizes = num_heads, kv_layer.itemsize, multiprocessor_of(kv_layer.device)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=1,
        num_slots=len(kv_layer),
        narrow_rows=tile_rows("narrow", *sizes),
        wide_rows=tile_rows("wide", *sizes),
    )
    work = plan_work(rows, shape, padded_tokens)

    def bind(lists: DeviceArrays, page_table: Tensor) -> TritonLatentPlan:
        return TritonLatentPlan(lists, page_table, rows.page_size, scale, work.max_partials)

    return DevicePlan(work.arrays(), bind, light=work.light_arrays())


def latent_attention(q_latent: Tensor, q_rope: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
    """Tokens and heads may have any strides; a head's numbers are contiguous."""
    assert isinstance(plan, TritonLatentPlan), "the plan comes from this backend"
    assert q_latent.stride(2) == 1 and q_rope.stride(2) == 1 and kv_layer.is_contiguous()
    assert plan.scale > 0, "the largest score is the largest product"
    assert max(q_latent.numel(), q_rope.numel()) < 2**31, "offsets of queries are 32 bits"
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype, device=q_latent.device)
    partials = out.new_empty((plan.max_partials, *out.shape[1:]), dtype=torch.float32)
    partial_sums = out.new_empty((plan.max_partials, out.shape[1]), dtype=torch.float32)
    for width in ("narrow", "wide"):
        _attend(width, q_latent, q_rope, kv_layer, plan, out, partials, partial_sums)
    if plan.max_partials:
        starts, end = plan.lists["partial_start"], plan.lists["num_tokens"]
        merge_partials(starts, end, partials, partial_sums, out)
    return out


def tile_rows(width: str, num_heads: int, itemsize: int, multiprocessor: Multiprocessor) -> int:
    """Rows of a tile of a width, "narrow" or "wide"; itemsize: bytes of a number.

    A narrow tile holds a token's heads, as far as they go: 64 rows of 512 numbers in float32 are
    half of a multiprocessor's registers, and float32 products take the rest of what 16 leave. A
    wide tile holds several tokens where 64 rows do, but no more than leave registers enough. In 99
    KB of shared memory 32 rows leave room for keys.
    """
    if itemsize == 4:
        return 16
    most = 32 if multiprocessor.is_small or multiprocessor.has_tensor_memory else 64
    if width == "wide":
        return 32 if num_heads <= 8 else most
    return min(max(16, 1 << (num_heads - 1).bit_length()), most)


def tile_of(
    width: str, num_heads: int, latent_dim: int, itemsize: int, multiprocessor: Multiprocessor
) -> Tile:
    rows = tile_rows(width, num_heads, itemsize, multiprocessor)
    dim = max(padded_head_dim(latent_dim), 128)
    assert dim <= 512, f"latent_dim={latent_dim}: there are tiles for up to 512"
    tiles = _SMALL_TILES if multiprocessor.is_small else _TILES
    tile = Tile(rows, *tiles[itemsize, dim, rows])
    return residing(tile, dim * 9 // 8 * itemsize, multiprocessor)


# By bytes a number, latent_dim and rows: keys, warps, stages, residents.
_TILES = {
    (2, 128, 16): (64, 4, 3, 4),
    (2, 128, 32): (64, 4, 3, 3),
    (2, 128, 64): (64, 4, 3, 2),
    (2, 256, 16): (64, 4, 3, 2),
    (2, 256, 32): (64, 4, 3, 2),
    (2, 256, 64): (64, 8, 3, 1),
    (2, 512, 16): (32, 4, 3, 2),
    (2, 512, 32): (64, 8, 3, 1),
    (2, 512, 64): (32, 8, 3, 1),
    (4, 128, 16): (32, 8, 3, 3),
    (4, 256, 16): (32, 4, 3, 2),
    (4, 512, 16): (16, 8, 3, 2),
}
_SMALL_TILES = _TILES | {
    (2, 512, 16): (32, 4, 3, 1),
    (2, 512, 32): (16, 4, 3, 1),
    (4, 512, 16): (16, 8, 2, 1),
}


def _attend(
    width: str,
    q_latent: Tensor,
    q_rope: Tensor,
    kv_layer: Tensor,
    plan: TritonLatentPlan,
    out: Tensor,
    partials: Tensor,
    partial_sums: Tensor,
) -> None:
    """Launch one width over its items, which may be none."""
    runs, items = plan.lists[f"{width}_runs"], plan.lists[f"{width}_items"]
    if not len(items):
        return
    _, num_heads, latent_dim = q_latent.shape
    rope_dim = q_rope.shape[2]
    multiprocessor = multiprocessor_of(out.device)
    tile = tile_of(width, num_heads, latent_dim, kv_layer.itemsize, multiprocessor)
    _attend_items[(num_programs(out.device, tile.residents),)](
        q_latent, q_rope, kv_layer, plan.page_table, runs, items, plan.lists["num_items"],
        plan.lists["partial_start"], out, partials, partial_sums, runs.shape[1],
        plan.page_table.stride(0), q_latent.stride(0), q_latent.stride(1), q_rope.stride(0),
        q_rope.stride(1), plan.scale * _LOG2_E,
        WIDTH=0 if width == "narrow" else 1, NUM_HEADS=num_heads, LATENT_DIM=latent_dim,
        ROPE_DIM=rope_dim, PAGE_SIZE=plan.page_size, TILE_HEADS=min(num_heads, tile.rows),
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_L=padded_head_dim(latent_dim),
        BLOCK_R=padded_head_dim(rope_dim),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


@triton.jit
def _store_latent(
    latent, kv, slots, latent_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    row = tl.load(latent + token.to(tl.int64) * latent_stride + columns, mask=columns < SIZE)
    tl.store(kv + slot * SIZE + columns, row, mask=columns < SIZE)


@triton.jit
def _slots(pages, keys, last_key, PAGE_SIZE: tl.constexpr):
    """Repeats the last key's slot after the last key: it may be read, and is masked."""
    keys = tl.minimum(keys, last_key)
    slots = tl.load(pages + keys // PAGE_SIZE)
    return slots if PAGE_SIZE == 1 else slots * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit(do_not_specialize=["max_runs"])
def _attend_items(
    q_latent, q_rope, kv, page_table, runs, items, num_items, partial_start, out, partials,
    partial_sums, max_runs, table_stride, latent_stride, latent_head_stride, rope_stride,
    rope_head_stride, scale,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A program processes every num_programs-th unit: an item by TILE_HEADS heads."""
    HEAD_TILES: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_l = tl.arange(0, BLOCK_L)
    offs_r = tl.arange(0, BLOCK_R)
    is_latent = (offs_l < LATENT_DIM)[None, :]
    is_rope = (offs_r < ROPE_DIM)[None, :]
    num_units = tl.load(num_items + WIDTH) * HEAD_TILES
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        item = unit // HEAD_TILES
        run = runs + tl.load(items + item)
        token = tl.load(run + _TOKEN * max_runs)
        num_tokens = tl.load(run + _NUM_TOKENS * max_runs)
        pages = page_table + tl.load(run + _TABLE_ROW * max_runs).to(tl.int64) * table_stride
        position = tl.load(run + _POSITION * max_runs)
        part_keys = tl.load(run + _PART_KEYS * max_runs)
        part = item - tl.load(run + _FIRST_ITEM * max_runs)
        first_key = tl.load(run + _FIRST_KEY * max_runs) + part * part_keys
        end_key = tl.minimum(first_key + part_keys, tl.load(run + _END_KEY * max_runs))

        row_token = offs_m // TILE_HEADS
        head = unit % HEAD_TILES * TILE_HEADS + offs_m % TILE_HEADS
        is_row = (row_token < num_tokens) & (head < NUM_HEADS)
        latent_at = q_latent + ((token + row_token) * latent_stride + head * latent_head_stride)
        rope_at = q_rope + ((token + row_token) * rope_stride + head * rope_head_stride)
        q_l = tl.load(
            latent_at[:, None] + offs_l[None, :], mask=is_row[:, None] & is_latent, other=0.0
        )
        q_r = tl.load(rope_at[:, None] + offs_r[None, :], mask=is_row[:, None] & is_rope, other=0.0)

        is_whole = position < 0
        last_seen = tl.where(is_whole, end_key - 1, tl.minimum(position + row_token, end_key - 1))
        m = tl.full([BLOCK_M], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
        next_slots = _slots(pages, first_key + offs_n, end_key - 1, PAGE_SIZE)
        for start in range(first_key, end_key, BLOCK_N):
            slots = next_slots
            next_slots = _slots(pages, start + BLOCK_N + offs_n, end_key - 1, PAGE_SIZE)
            key = start + offs_n
            at = kv + slots.to(tl.int64)[:, None] * (LATENT_DIM + ROPE_DIM)
            if BLOCK_L == LATENT_DIM:
                latent = tl.load(at + offs_l[None, :])
            else:
                latent = tl.load(at + offs_l[None, :], mask=is_latent, other=0.0)
            if BLOCK_R == ROPE_DIM:
                rope = tl.load(at + LATENT_DIM + offs_r[None, :])
            else:
                rope = tl.load(at + LATENT_DIM + offs_r[None, :], mask=is_rope, other=0.0)
            scores = tl.dot(q_r, tl.trans(rope), input_precision="ieee")
            scores = tl.dot(q_l, tl.trans(latent), scores, input_precision="ieee")
            scores = tl.where(key[None, :] <= last_seen[:, None], scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1) * scale)
            p = tl.exp2(scores * scale - m_new[:, None])
            decay = tl.exp2(m - m_new)
            total = total * decay + tl.sum(p, 1)
            acc = tl.dot(p.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
            m = m_new

        # A row may see no key of this item: its maximum stays the lowest value, of weight 0.
        total = tl.where(total == 0.0, 1.0, total)
        result = acc * (1.0 / total)[:, None]
        # Loaded again: kept, what is made of them would fill registers throughout the loop.
        token = tl.load(run + _TOKEN * max_runs)
        is_row = (row_token < tl.load(run + _NUM_TOKENS * max_runs)) & (head < NUM_HEADS)
        is_stored = is_row[:, None] & is_latent
        first_part = tl.load(run + _FIRST_PART * max_runs)
        if first_part < 0:
            out_row = (token + row_token) * NUM_HEADS + head
            out_at = out + out_row[:, None] * LATENT_DIM + offs_l[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=is_stored)
        else:
            partial = tl.load(partial_start + token + row_token, mask=is_row, other=0)
            place = (partial + first_part + part).to(tl.int64) * NUM_HEADS + head
            part_at = partials + place[:, None] * LATENT_DIM + offs_l[None, :]
            tl.store(part_at, result, mask=is_stored)
            tl.store(partial_sums + place, m + tl.log2(total), mask=is_row)
