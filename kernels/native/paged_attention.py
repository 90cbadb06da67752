"""Paged and tree attention by a work list; the C++ is in src/attention.cpp.

    item    a run of query tokens by a run of KV slots, seen whole or up to each token's own place
    unit    an item by a KV head: a thread's unit of work

A segment is one item for all its rows' tokens, each row's own KV another; tokens served by more
than one item are merged afterwards. With a window an item begins at the first key that one of its
tokens sees, and sink tokens are a separate item. The list is made once a step, by array operations.
If head_dim is no multiple of 16, plain torch calls run instead.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..attention_rows import AttentionRows, IntArray
from ..chunked_rows import in_chunks
from ..cpu import paged_attention as cpu
from ..model_options import DEFAULT_OPTIONS, AttentionOptions
from ..ops import KVLayer
from ..quantized_tensors import head_dim_of
from ..visible_keys import VisibleKeys, visible_keys
from .bindings import library
from .calls import kernel
from .kv_format import kv_format

# A row in a segment has one more partial result to write and merge, which takes as long as the keys
# of some 16 to 32 tokens (an estimate by instruction counts).
SEGMENT_COST_TOKENS = 32
# Tokens of an item: with the 1 to 8 query heads of a KV head (of latents there are more), their
# sums and scores stay in a core's second-level cache, and a block of keys is packed once for all.
_MAX_ITEM_TOKENS = 64
# A lone row's keys are split if there are fewer units than this, into parts no shorter than that
# (guesses).
_FEW_UNITS = 8
_MIN_PART_KEYS = 512
_BLOCK_TOKENS = 16  # fill a vector, where rows are lanes (src/row_lanes.h)
_BLOCK_KEYS = 64  # kKeys in src/kv_format.h


class _Plan(ctypes.Structure):
    _fields_ = (
        ("items", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_items", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
        ("merged_tokens", ctypes.c_void_p),
        ("merged_first", ctypes.c_void_p),
        ("merged_partials", ctypes.c_void_p),
        ("num_merged", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("values_at", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class _Items:
    """Collects items; src/attention.cpp defines the columns: token, num_tokens, first_slot,
    num_keys, num_visible, num_hidden.

    With one slot a page the page table itself is the list of slots and nothing is copied.
    """

    def __init__(self, rows: AttentionRows) -> None:
        self.rows = rows
        self.parts: list[IntArray] = []
        self._slots: list[IntArray] = []
        self._num_slots = 0

    def add(self, table: IntArray, row: int, first: int, last: int) -> None:
        """Items over tokens [first, last) of a row, each with its first token for a first slot."""
        rows = self.rows
        if rows.page_size == 1:
            table[:, 2] += int(rows.table_rows[row]) * rows.page_table.shape[1]
        else:
            table[:, 2] += self._append(rows.slots(row, first, last)) - first
        self.parts.append(table)

    def add_decode(self, table: IntArray, decode: IntArray, first: IntArray) -> None:
        """An item for each of the rows `decode`, from its token `first` on; num_keys is set."""
        rows = self.rows
        table_rows = rows.table_rows[decode]
        if rows.page_size == 1:
            table[:, 2] = table_rows * rows.page_table.shape[1] + first
        else:
            lens = table[:, 3]
            starts = np.cumsum(lens, dtype=np.int32) - lens
            row_of_key = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
            places = np.arange(int(lens.sum()), dtype=np.int32) + (first - starts)[row_of_key]
            pages, offsets = np.divmod(places, np.int32(rows.page_size))
            entries = rows.page_table[table_rows[row_of_key], pages]
            table[:, 2] = self._append(entries * np.int32(rows.page_size) + offsets) + starts
        self.parts.append(table)

    def slots(self) -> IntArray:
        """The slots that first_slot indexes."""
        if self.rows.page_size == 1:
            return self.rows.page_table.reshape(-1)
        return np.concatenate(self._slots)

    def _append(self, slots: IntArray) -> int:
        begin = self._num_slots
        self._slots.append(slots)
        self._num_slots += len(slots)
        return begin


class NativeAttentionPlan:
    """A step's work list, and the record of it that the C++ reads. I items, P partial results, M
    merged tokens.

    items [I, 7]: the columns of `_Items`, and the first token's partial or -1; slots [S];
    merged_tokens [M]; partials of merged_tokens[i]: merged_partials [P] from merged_first[i] to
    merged_first[i + 1]. All int32.
    """

    def __init__(
        self,
        items: IntArray,
        slots: IntArray,
        merged_tokens: IntArray,
        merged_first: IntArray,
        merged_partials: IntArray,
    ) -> None:
        self.items = np.ascontiguousarray(items)
        self.slots = slots
        self.merged = (merged_tokens, merged_first, merged_partials)
        self._record = _Plan(
            items=self.items.ctypes.data,
            slots=self.slots.ctypes.data,
            num_items=len(self.items),
            merged_tokens=merged_tokens.ctypes.data,
            merged_first=merged_first.ctypes.data,
            merged_partials=merged_partials.ctypes.data,
            num_merged=len(merged_tokens),
        )
        self.address = ctypes.addressof(self._record)

    def set_shape(
        self,
        num_heads: int,
        kv_layer: KVLayer,
        options: AttentionOptions,
        num_partials: int | None = None,
    ) -> None:
        """Set what does not depend on the rows. num_partials: where none of them is merged."""
        format_number, values, _ = kv_format(kv_layer)
        num_parts, num_kv_heads, num_slots, width = values.shape
        head_dim = head_dim_of(kv_layer)
        if num_partials is None:
            num_partials = len(self.merged[2])
        self._partials = torch.empty(num_partials, num_heads, head_dim + 2, dtype=torch.float32)
        record = self._record
        record.partials = self._partials.data_ptr()
        record.num_heads, record.num_kv_heads = num_heads, num_kv_heads
        record.num_slots, record.head_dim = num_slots, head_dim
        # Latents, one part, are keys and values at once.
        record.values_at = (num_parts - 1) * num_kv_heads * num_slots * width
        record.format = format_number
        record.scale = head_dim**-0.5 if options.scale is None else options.scale
        record.soft_cap = options.soft_cap or 0.0

    @property
    def partials(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of P tokens: sums of values [P, num_heads, head_dim]; the largest score, in units of
        `softmax_scale`, and the sum of exponentials below it [P, num_heads]. Float32."""
        return self._partials[..., :-2], self._partials[..., -2], self._partials[..., -1]

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by before their exponentials."""
        return 1.0 if self._record.soft_cap else float(self._record.scale)


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> object:
    num_kv_heads = kv_format(kv_layer)[1].shape[1]
    if head_dim_of(kv_layer) % 16:
        return cpu.plan_attention(rows, kv_layer, num_heads, options)
    rows = in_chunks(rows, options.chunk)
    plan = _plan_lone_row(rows, options) or _plan_rows(rows, options, num_kv_heads)
    plan.set_shape(num_heads, kv_layer, options)
    return plan


def _plan_rows(
    rows: AttentionRows, options: AttentionOptions, num_kv_heads: int
) -> NativeAttentionPlan:
    items, keys = _Items(rows), visible_keys(rows, options)
    for segment in keys.segments.tolist():
        _add_segment(items, *segment)
    num_queries = rows.num_queries
    for row in np.flatnonzero(num_queries > 1).tolist():
        _add_prefill(items, row, keys, options.window)
    decode = np.flatnonzero(num_queries == 1).astype(np.int32)
    if len(decode):
        _add_decode(items, decode, keys, num_kv_heads)
    return _with_partials(np.concatenate(items.parts), items.slots(), int(rows.query_start[-1]))


def _plan_lone_row(rows: AttentionRows, options: AttentionOptions) -> NativeAttentionPlan | None:
    """The plan of a step at batch 1, by plain integers: the array operations of the general way
    take longer than attention itself. None: it has more than one item."""
    if rows.num_rows > 1 or len(rows.segments) or options.window is not None:
        return None
    num_tokens, seq_len = int(rows.query_start[1]), int(rows.seq_lens[0])
    most_keys = 2 * _MIN_PART_KEYS - 1 if num_tokens == 1 else seq_len
    if num_tokens > _MAX_ITEM_TOKENS or seq_len > most_keys:
        return None
    if rows.page_size == 1:
        first_slot = int(rows.table_rows[0]) * rows.page_table.shape[1]
        slots = rows.page_table.reshape(-1)
    else:
        first_slot, slots = 0, rows.slots(0, 0, seq_len)
    num_visible = seq_len - num_tokens + 1  # to the first token
    hidden = 0 if num_tokens == 1 else -_MAX_ITEM_TOKENS
    item = [0, num_tokens, first_slot, seq_len, num_visible, hidden, -1]
    return NativeAttentionPlan(np.array([item], dtype=np.int32), slots, NONE, NO_MERGES, NONE)


def plan_fixed_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
) -> NativeAttentionPlan:
    """As `plan_attention`, but a token's keys are cut by its position alone, whatever else is in
    the step; head_dim must be a multiple of 16."""
    rows = in_chunks(rows, options.chunk)
    items = _Items(rows)
    lens, num_queries, window = rows.seq_lens, rows.num_queries, options.window
    num_sinks = np.zeros_like(lens)
    if window is not None:
        num_sinks = np.minimum(options.num_sink_tokens, lens)
    for row in np.flatnonzero(num_queries > 1).tolist():
        sinks = int(num_sinks[row])
        _add_run(items, row, 0, sinks, None)
        _add_run(items, row, sinks, int(lens[row]), window, _BLOCK_KEYS)
    decode = np.flatnonzero(num_queries == 1).astype(np.int32)
    if len(decode):
        begin, last = num_sinks[decode], lens[decode]
        first = begin if window is None else np.maximum(last - window, begin)
        _add_decode_run(items, decode, np.zeros_like(begin), begin)
        _add_decode_run(items, decode, first, last, (first - begin) % _BLOCK_KEYS)
    plan = _with_partials(np.concatenate(items.parts), items.slots(), int(rows.query_start[-1]))
    plan.set_shape(num_heads, kv_layer, options)
    return plan


def paged_attention(
    q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
) -> Tensor:
    if isinstance(plan, cpu.CpuAttentionPlan):
        return cpu.paged_attention(q, kv_layer, plan, sink_logits)
    assert isinstance(plan, NativeAttentionPlan), "the plan comes from this backend"
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1 and q.stride(1) == head_dim, "a token's heads are contiguous"
    assert sink_logits is None or sink_logits.dtype is torch.float32
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype)
    _, values, scales = kv_format(kv_layer)
    scales_at = None if scales is None else scales.data_ptr()
    _attention(q.dtype)(
        plan.address,
        q.data_ptr(),
        q.stride(0),
        values.data_ptr(),
        scales_at,
        None if sink_logits is None else sink_logits.data_ptr(),
        out.data_ptr(),
    )
    return out


@functools.cache
def _attention(dtype: torch.dtype) -> Callable[..., None]:
    if dtype is torch.float32:
        run: Callable[..., None] = library().stemma_float_attention  # of steps not recorded
        return run
    return kernel("stemma_attention")


def _add_segment(items: _Items, first: int, last: int, row_start: int, row_end: int) -> None:
    query_start = items.rows.query_start
    table = token_tiles(int(query_start[row_start]), int(query_start[row_end]))
    table[:, 2] = first
    table[:, 3] = table[:, 4] = last - first
    table[:, 5] = -table[:, 1]
    items.add(table, row_start, first, last)


def _add_prefill(items: _Items, row: int, keys: VisibleKeys, window: int | None) -> None:
    """The row's runs, each for one tile of tokens at a time."""
    sinks, seq_len = int(keys.num_sinks[row]), int(items.rows.seq_lens[row])
    _add_run(items, row, 0, sinks, None)
    _add_run(items, row, int(keys.first[row]), int(keys.shared_start[row]), window)
    _add_run(items, row, int(keys.own_start[row]), seq_len, window)


def _add_run(
    items: _Items, row: int, first: int, last: int, window: int | None, block: int = 1
) -> None:
    """Keys [first, last) for all tokens of a row that see any of them; items begin at multiples of
    `block` keys from the first."""
    if first >= last:
        return
    rows = items.rows
    token, token_end = int(rows.query_start[row]), int(rows.query_start[row + 1])
    table = token_tiles(token, token_end)
    position = table[:, 0] + (int(rows.seq_lens[row]) - token_end)  # of a tile's first token
    hidden_end = np.full_like(position, first - _MAX_ITEM_TOKENS)
    if window is not None:
        hidden_end = position + (1 - window)
    begin = np.maximum(first, hidden_end)
    begin -= (begin - first) % block
    table[:, 2] = begin
    table[:, 3] = np.minimum(last, position + table[:, 1]) - begin
    table[:, 4] = position + 1 - begin
    table[:, 5] = hidden_end - begin
    # Later tiles see more: they come first, so that no thread ends with a long one.
    items.add(table[table[:, 3] > 0][::-1].copy(), row, first, last)


def _add_decode(items: _Items, decode: IntArray, keys: VisibleKeys, num_kv_heads: int) -> None:
    """Rows with one query, which sees all of its row's runs."""
    _add_decode_run(items, decode, np.zeros_like(decode), keys.num_sinks[decode])
    _add_decode_run(items, decode, keys.first[decode], keys.shared_start[decode])
    _add_decode_run(items, decode, keys.own_start[decode], items.rows.seq_lens[decode])
    if len(decode) * num_kv_heads < _FEW_UNITS:
        items.parts[-1] = _split_keys(items.parts[-1], -(-_FEW_UNITS // num_kv_heads))


def _add_decode_run(
    items: _Items,
    decode: IntArray,
    first: IntArray,
    last: IntArray,
    num_hidden: IntArray | None = None,
) -> None:
    """Keys [first, last) of each row; its item begins `num_hidden` keys before them."""
    hidden = np.zeros_like(first) if num_hidden is None else num_hidden
    is_there = last > first
    if not is_there.all():
        decode, first, last, hidden = (column[is_there] for column in (decode, first, last, hidden))
    if not len(decode):
        return
    table = np.empty((len(decode), 7), dtype=np.int32)
    table[:, 0] = items.rows.query_start[decode]
    table[:, 1] = 1
    table[:, 3] = table[:, 4] = last - first + hidden
    table[:, 5] = hidden
    items.add_decode(table, decode, first - hidden)


def _split_keys(table: IntArray, num_parts: int) -> IntArray:
    """Each item as up to `num_parts` items of parts of its keys."""
    if int(table[:, 3].max()) < 2 * _MIN_PART_KEYS:
        return table
    parts = []
    for item in table:
        count = max(1, min(num_parts, int(item[3]) // _MIN_PART_KEYS))
        bounds = np.linspace(0, item[3], count + 1).astype(np.int32)
        split = np.tile(item, (count, 1))
        split[:, 2] += bounds[:-1]
        split[:, 3] = split[:, 4] = np.diff(bounds)
        parts.append(split)
    return np.concatenate(parts)


def token_tiles(token: int, token_end: int) -> IntArray:
    """Items' columns, with tokens [token, token_end) cut into tiles of nearly as many blocks of
    tokens, of which only the last may be cut."""
    num_tokens = token_end - token
    num_tiles = -(-num_tokens // _MAX_ITEM_TOKENS)
    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    blocks = np.arange(num_tiles + 1, dtype=np.int64) * num_blocks // num_tiles
    bounds = token + np.minimum(blocks * _BLOCK_TOKENS, num_tokens)
    table = np.zeros((num_tiles, 7), dtype=np.int32)
    table[:, 0] = bounds[:-1]
    table[:, 1] = np.diff(bounds)
    return table


def _with_partials(table: IntArray, slots: IntArray, num_tokens: int) -> NativeAttentionPlan:
    """Number the partial results of tokens that more than one item serves."""
    counts = table[:, 1]
    if int(counts.sum()) == num_tokens:
        table[:, 6] = -1
        return NativeAttentionPlan(table, slots, NONE, NO_MERGES, NONE)
    item_of = np.repeat(np.arange(len(table), dtype=np.int32), counts)
    first_of = np.cumsum(counts, dtype=np.int32) - counts
    token_of = table[item_of, 0] + np.arange(len(item_of), dtype=np.int32) - first_of[item_of]
    num_serving = np.bincount(token_of, minlength=num_tokens)
    # By item: all its tokens are merged, if only one with itself, which changes no bit, or none is.
    is_merged = np.maximum.reduceat(num_serving[token_of], first_of) > 1
    table[:, 6] = np.where(is_merged, np.cumsum(counts * is_merged) - counts, -1)
    served = token_of[is_merged[item_of]]
    num_partials = np.bincount(served, minlength=num_tokens)
    merged_tokens = np.flatnonzero(num_partials).astype(np.int32)
    merged_first = np.zeros(len(merged_tokens) + 1, dtype=np.int32)
    np.cumsum(num_partials[merged_tokens], out=merged_first[1:])
    order = np.argsort(served, kind="stable").astype(np.int32)
    return NativeAttentionPlan(table, slots, merged_tokens, merged_first, order)


NONE = np.zeros(0, dtype=np.int32)
NO_MERGES = np.zeros(1, dtype=np.int32)
