"""Paged attention of a whole step by a work list: decode, prompt chunks and shared segments alike.

    tile     BLOCK_M rows (query tokens by the query heads of one KV head) against BLOCK_N keys at
             a time, softmax online (Milakov and Gimelshein 2018; FlashAttention-2: Dao 2023)
    narrow   the tokens of a decode row: 16 rows and more, several tiles a multiprocessor, bound by
             the bandwidth of KV
    wide     prompt chunks and segments of many rows: products wide enough for Hopper's wgmma

Both widths are one kernel. A fixed number of programs process the items of `work_list` in turn,
each for one KV head; the number of items is read on the device. A token with several items leaves a
normalized result and the logarithm of its sum for each (base 2), which a second kernel merges
(split KV: Flash-Decoding, Dao et al. 2023; cascades: FlashInfer, Ye et al. 2024). Scores and sums
are in float32, probabilities are rounded to the queries' dtype for the second product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..model_options import DEFAULT_OPTIONS, AttentionOptions
from ..ops import DeviceArrays, DevicePlan, KVLayer
from ..quantized_tensors import QuantizedKV
from . import work_list
from .attention_tiles import padded_head_dim, tile_of, tile_rows
from .dependent_launch import await_inputs, launch_options
from .device_multiprocessor import multiprocessor_of
from .language import tl, triton
from .merge import add_sinks, merge_partials, num_programs
from .work_list import AttentionShape, plan_work

# A row's cost of being in a segment, in tokens of KV. A partial result is written and read in
# float32, 8 bytes a number and query head; a token's KV has 2 numbers of 2 bytes a KV head. So one
# is worth 2 * group tokens (8 at Llama-3's 4), and a lone segment has some 8 parts. Counted, not
# measured.
SEGMENT_COST_TOKENS = 64

_LOG2_E = math.log2(math.e)
# Of quantized KV a probability is multiplied by its value's scale, in float16: by so much more,
# that small ones stay normal, and all of float16's values finite (65,504 / 127 * 64 < 65,504).
_VALUE_UNIT = 64.0
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
class TritonAttentionPlan:
    """A step's work list on the device, and the constants of all steps."""

    lists: DeviceArrays  # WorkList.arrays
    page_table: Tensor  # [max_running_requests, max_pages] int32
    page_size: int
    options: AttentionOptions
    max_partials: int


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> DevicePlan:
    values = kv_layer.values if isinstance(kv_layer, QuantizedKV) else kv_layer
    _, num_kv_heads, num_slots, _ = values.shape
    group = num_heads // num_kv_heads
    sizes = group, values.itemsize, values.shape[3], multiprocessor_of(values.device)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_slots=num_slots,
        narrow_rows=tile_rows("narrow", *sizes),
        wide_rows=tile_rows("wide", *sizes),
        window=options.window,
        num_sink_tokens=options.num_sink_tokens,
        chunk=options.chunk,
    )
    work = plan_work(rows, shape, padded_tokens)

    def bind(lists: DeviceArrays, page_table: Tensor) -> TritonAttentionPlan:
        return TritonAttentionPlan(lists, page_table, rows.page_size, options, work.max_partials)

    return DevicePlan(work.arrays(), bind, light=work.light_arrays())


def paged_attention(
    q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
) -> Tensor:
    assert isinstance(plan, TritonAttentionPlan), "the plan comes from this backend"
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1 and q.stride(1) == head_dim, "a token's heads are contiguous"
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    sums_shape = plan.max_partials, num_heads
    partials = torch.empty((*sums_shape, head_dim), dtype=torch.float32, device=q.device)
    partial_sums = torch.empty(sums_shape, dtype=torch.float32, device=q.device)
    for width in ("narrow", "wide"):
        _attend(width, q, kv_layer, plan, sink_logits, out, partials, partial_sums)
    if plan.max_partials:
        starts, end = plan.lists["partial_start"], plan.lists["num_tokens"]
        merge_partials(starts, end, partials, partial_sums, out, sink_logits)
    return out


def _attend(
    width: str,
    q: Tensor,
    kv_layer: KVLayer,
    plan: TritonAttentionPlan,
    sink_logits: Tensor | None,
    out: Tensor,
    partials: Tensor,
    partial_sums: Tensor,
) -> None:
    """Launch one width over its items, which may be none."""
    runs, items = plan.lists[f"{width}_runs"], plan.lists[f"{width}_items"]
    if not len(items):
        return
    _, num_heads, head_dim = q.shape
    is_quantized = isinstance(kv_layer, QuantizedKV)
    values = kv_layer.values if isinstance(kv_layer, QuantizedKV) else kv_layer
    is_served = q.itemsize == 2 if is_quantized else q.dtype == values.dtype
    assert is_served, f"no kernel for {q.dtype} queries over {values.dtype} KV"
    assert values.stride(3) == 1 and values.stride(2) == head_dim, "a head's slots are contiguous"
    scales = kv_layer.scales if isinstance(kv_layer, QuantizedKV) else partial_sums  # not read
    pairs = values.view(torch.int16) if is_quantized else values  # of neighbours
    num_kv_heads = values.shape[1]
    options = plan.options
    scale = head_dim**-0.5 if options.scale is None else options.scale
    assert scale > 0, "the largest score is the largest product"
    cap = options.soft_cap
    group, has_sinks = num_heads // num_kv_heads, sink_logits is not None
    multiprocessor = multiprocessor_of(q.device)
    tile = tile_of(width, head_dim, group, values.itemsize, multiprocessor, has_sinks=has_sinks)
    _attend_items[(num_programs(q.device, tile.residents),)](
        q, values, pairs, scales, plan.page_table, runs, items, plan.lists["num_items"],
        plan.lists["partial_start"], sink_logits, out, partials, partial_sums,
        runs.shape[1], plan.page_table.stride(0), q.stride(0), values.stride(0), values.stride(1),
        scales.stride(0), scales.stride(1),
        scale * _LOG2_E if cap is None else 2 * scale / cap * _LOG2_E,
        0.0 if cap is None else cap * _LOG2_E,
        WIDTH=0 if width == "narrow" else 1,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        PAGE_SIZE=plan.page_size,
        WINDOW=options.window or 0, NUM_SINKS=options.num_sink_tokens, HAS_CAP=cap is not None,
        IS_QUANTIZED=is_quantized,
        VALUE_UNIT=_VALUE_UNIT if is_quantized else 1.0,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=padded_head_dim(head_dim),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(q.device),
    )  # fmt: skip


@triton.jit
def _slots(pages, keys, PAGE_SIZE: tl.constexpr):
    slots = tl.load(pages + keys // PAGE_SIZE)
    return slots if PAGE_SIZE == 1 else slots * PAGE_SIZE + keys % PAGE_SIZE


@triton.jit
def _half_queries(q):
    """A tile's queries as float16, and the power of two that they were divided by: nothing
    overflows, and of bfloat16 only what is below 2^-24 of the tile's largest is lost."""
    wide = q.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(wide), axis=1), axis=0).to(tl.int32, bitcast=True)
    unit = (largest & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.where((unit > 0.0) & (unit < float("inf")), unit, 1.0)
    return (wide / unit).to(tl.float16), unit


@triton.jit
def _attend_blocks(
    q, q_odd, scales, pages, begin, end, gap_begin, gap, first_key, end_key, upper, lower,
    m, total, acc, odd, source, kv_stride, scales_stride, score_scale, cap,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    NUM_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, IS_QUANTIZED: tl.constexpr,
    IS_FLOAT: tl.constexpr, VALUE_UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Processes blocks `begin` to `end` of keys and values, skipping `gap` blocks from `gap_begin`
    on: updates the rows' maxima, sums and weighted values.

    Slots are looked up one block ahead, so that nothing delays a block's loads, which the pipeline
    issues num_stages - 1 blocks ahead. After the item's end its last key is loaded again, which
    belongs to the row, and masked.
    """
    IS_PAIRED: tl.constexpr = IS_QUANTIZED and q.shape[0] < 64
    BLOCK_D: tl.constexpr = q.shape[1]
    SIZE: tl.constexpr = HEAD_DIM // 2 if IS_PAIRED else HEAD_DIM
    offs_n = tl.arange(0, BLOCK_N)
    first = first_key + tl.where(begin >= gap_begin, begin + gap, begin) * BLOCK_N + offs_n
    next_slots = _slots(pages, tl.minimum(first, end_key - 1), PAGE_SIZE)
    for index in range(begin, end):
        slots = next_slots
        ahead = index + 1
        ahead = first_key + tl.where(ahead >= gap_begin, ahead + gap, ahead) * BLOCK_N + offs_n
        next_slots = _slots(pages, tl.minimum(ahead, end_key - 1), PAGE_SIZE)
        at = source + slots.to(tl.int64)[:, None] * SIZE + tl.arange(0, BLOCK_D)[None, :]
        k = _numbers(at, SIZE)
        v = _numbers(at + (kv_stride // 2 if IS_PAIRED else kv_stride), SIZE)
        if IS_PAIRED:
            scores = tl.dot(q, tl.trans(_halves(k, IS_FLOAT)))
            scores = tl.dot(q_odd, tl.trans(_halves(k >> 8, IS_FLOAT)), scores)
        else:
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        # If nothing needs the scores themselves their scale is folded into the exponent's FFMA.
        SCALE_LATE: tl.constexpr = not (IS_QUANTIZED or HAS_CAP)
        if IS_QUANTIZED:
            scores *= (tl.load(scales + slots) * score_scale)[None, :]
        elif HAS_CAP:
            scores *= score_scale
        if HAS_CAP:
            # cap * tanh(x), tanh(x) = 1 - 2 / (e^2x + 1); the scale has made a power of 2 of it.
            scores = cap - 2.0 * cap / (tl.exp2(scores) + 1.0)
        if IS_MASKED:
            block = tl.where(index >= gap_begin, index + gap, index)
            key = first_key + block * BLOCK_N + offs_n
            is_seen = (key[None, :] <= upper[:, None]) & (key < end_key)[None, :]
            if WINDOW > 0:
                is_near = key[None, :] >= lower[:, None]
                if NUM_SINKS > 0:
                    is_near = is_near | (key < NUM_SINKS)[None, :]
                is_seen = is_seen & is_near
            scores = tl.where(is_seen, scores, float("-inf"))
        late_scale = score_scale if SCALE_LATE else 1.0
        m_new = tl.maximum(m, tl.max(scores, 1) * late_scale)
        p = tl.exp2(scores * late_scale - m_new[:, None])
        decay = tl.exp2(m - m_new)
        total = total * decay + tl.sum(p, 1)
        m = m_new
        if IS_QUANTIZED:
            p *= (tl.load(scales + scales_stride + slots) * VALUE_UNIT)[None, :]
        acc = acc * decay[:, None]
        p = p.to(q.dtype)
        if IS_PAIRED:
            acc = tl.dot(p, _halves(v, IS_FLOAT), acc)
            odd = tl.dot(p, _halves(v >> 8, IS_FLOAT), odd * decay[:, None])
        else:
            acc = tl.dot(p, v.to(q.dtype), acc, input_precision=PRECISION)
    return m, total, acc, odd


@triton.jit
def _numbers(at, SIZE: tl.constexpr):
    """Of keys or values, zeros past SIZE."""
    if at.shape[1] == SIZE:
        numbers = tl.load(at)
    else:
        numbers = tl.load(at, mask=(tl.arange(0, at.shape[1]) < SIZE)[None, :], other=0.0)
    return numbers


@triton.jit
def _halves(pairs, IS_FLOAT: tl.constexpr):
    """The numbers in the low bytes of int16, float8_e4m3fn or int8, as float16."""
    if IS_FLOAT:
        return pairs.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # 0x6400 is 1,024, whose last bits are ones: with 128 added to the number in place of its sign.
    return ((pairs & 0xFF) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0


@triton.jit(do_not_specialize=["max_runs"])
def _attend_items(
    q, kv, pairs, scales, page_table, runs, items, num_items, partial_start, sink_logits, out,
    partials, partial_sums, max_runs, table_stride, q_stride, kv_stride, head_stride, scales_stride,
    scales_head_stride,
    score_scale, cap,
    WIDTH: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, NUM_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr, IS_QUANTIZED: tl.constexpr, VALUE_UNIT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program processes every num_programs-th unit (an item by a KV head), back and forth.

    Units are sorted longest first; going back and forth balances the programs' work.
    """
    await_inputs(IS_DEPENDENT)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    TILE_HEADS: tl.constexpr = min(GROUP, BLOCK_M)
    HEAD_TILES: tl.constexpr = NUM_KV_HEADS * ((GROUP + TILE_HEADS - 1) // TILE_HEADS)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_units = tl.load(num_items + WIDTH) * HEAD_TILES
    full_rounds = num_units // num_programs
    last = program if full_rounds % 2 == 0 else num_programs - 1 - program
    num_rounds = full_rounds + (last < num_units % num_programs).to(tl.int32)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    for turn in range(num_rounds):
        unit = turn * num_programs + (program if turn % 2 == 0 else num_programs - 1 - program)
        item = unit // HEAD_TILES
        head_tile = unit % HEAD_TILES
        kv_head = head_tile % NUM_KV_HEADS
        run = runs + tl.load(items + item)
        token = tl.load(run + _TOKEN * max_runs)
        num_tokens = tl.load(run + _NUM_TOKENS * max_runs)
        pages = page_table + tl.load(run + _TABLE_ROW * max_runs).to(tl.int64) * table_stride
        position = tl.load(run + _POSITION * max_runs)
        part = item - tl.load(run + _FIRST_ITEM * max_runs)
        part_keys = tl.load(run + _PART_KEYS * max_runs)
        first_part = tl.load(run + _FIRST_PART * max_runs)
        first_key = tl.load(run + _FIRST_KEY * max_runs) + part * part_keys
        end_key = tl.minimum(first_key + part_keys, tl.load(run + _END_KEY * max_runs))

        row_token = offs_m // TILE_HEADS
        group_head = head_tile // NUM_KV_HEADS * TILE_HEADS + offs_m % TILE_HEADS
        head = kv_head * GROUP + group_head
        is_row = (row_token < num_tokens) & (group_head < GROUP)
        q_at = q + (token + row_token).to(tl.int64) * q_stride + head * HEAD_DIM
        q_mask = is_row[:, None] & (offs_d < HEAD_DIM)[None, :]
        q_tile = tl.load(q_at[:, None] + offs_d[None, :], mask=q_mask, other=0.0)

        # Numbers of 8 bits are read two by two, which ldmatrix can transpose (it moves 16 bits):
        # the even ones and the odd ones of a head are products of their own.
        IS_PAIRED: tl.constexpr = IS_QUANTIZED and BLOCK_M < 64
        IS_FLOAT: tl.constexpr = kv.dtype.element_ty != tl.int8
        tile_scale = score_scale
        if IS_QUANTIZED:
            q_tile, unit = _half_queries(q_tile)
            tile_scale *= unit
        q_odd = q_tile
        if IS_PAIRED:
            q_tile, q_odd = tl.split(tl.reshape(q_tile, [BLOCK_M, BLOCK_D // 2, 2]))
        is_whole = position < 0
        upper = tl.where(is_whole, end_key, position + row_token)
        lower = tl.where(is_whole, 0, position + row_token - WINDOW + 1)
        num_blocks = tl.cdiv(end_key - first_key, BLOCK_N)
        m = tl.full([BLOCK_M], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if IS_PAIRED else BLOCK_D], tl.float32)
        odd = acc if IS_PAIRED else total
        if IS_PAIRED:
            source = pairs + kv_head.to(tl.int64) * (head_stride // 2)
        else:
            source = kv + kv_head.to(tl.int64) * head_stride
        head_scales = scales + kv_head.to(tl.int64) * scales_head_stride
        num_full = 0
        full_begin = 0
        if BLOCK_M >= 64:  # a narrow tile's masks cost almost nothing
            # Blocks [full_begin, full_end) are seen whole by all rows.
            seen_end = tl.where(is_whole, end_key, tl.minimum(position + 1, end_key))
            full_end = tl.maximum(seen_end - first_key, 0) // BLOCK_N
            if WINDOW > 0:
                hidden = tl.where(is_whole, 0, position + num_tokens - WINDOW - first_key)
                full_begin = tl.minimum(tl.cdiv(tl.maximum(hidden, 0), BLOCK_N), full_end)
            num_full = full_end - full_begin
            m, total, acc, odd = _attend_blocks(
                q_tile, q_odd, head_scales, pages, full_begin, full_end, full_end, 0, first_key,
                end_key, upper, lower, m, total, acc, odd, source, kv_stride, scales_stride,
                tile_scale, cap,
                HEAD_DIM, PAGE_SIZE, WINDOW, NUM_SINKS, HAS_CAP, IS_QUANTIZED, IS_FLOAT,
                VALUE_UNIT, PRECISION, BLOCK_N, False,
            )  # fmt: skip
        m, total, acc, odd = _attend_blocks(
            q_tile, q_odd, head_scales, pages, 0, num_blocks - num_full, full_begin, num_full,
            first_key, end_key, upper, lower, m, total, acc, odd, source, kv_stride, scales_stride,
            tile_scale, cap,
            HEAD_DIM, PAGE_SIZE, WINDOW, NUM_SINKS, HAS_CAP, IS_QUANTIZED, IS_FLOAT,
            VALUE_UNIT, PRECISION, BLOCK_N, True,
        )  # fmt: skip

        if IS_PAIRED:
            acc = tl.interleave(acc, odd)
        # A row may see no key of this item: its maximum stays the lowest value, of weight 0.
        total = tl.where(total == 0.0, 1.0, total)
        if first_part < 0:
            if sink_logits is not None:
                sinks = tl.load(sink_logits + head, mask=is_row, other=0.0)
                m, total, acc = add_sinks(sinks, m, total, acc)
            result = acc / (total * VALUE_UNIT)[:, None]
            place = (token + row_token).to(tl.int64) * NUM_HEADS + head
            out_at = out + place[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=q_mask)
        else:
            partial = tl.load(partial_start + token + row_token, mask=is_row, other=0)
            place = (partial + first_part + part).to(tl.int64) * NUM_HEADS + head
            result = acc / (total * VALUE_UNIT)[:, None]
            tl.store(partials + place[:, None] * HEAD_DIM + offs_d[None, :], result, mask=q_mask)
            tl.store(partial_sums + place, m + tl.log2(total), mask=is_row)
