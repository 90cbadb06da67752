"""Paged and tree attention by a work list; the C++ is in src/attention.cpp.

    item    a run of query tokens by a run of KV slots, seen whole or up to each token's own place
    unit    an item by a KV head: what a thread takes at a time

A segment is an item for all its rows' tokens, what a row has of its own another; tokens that more
than one item serves are merged afterwards. The list is made once a step, by array operations.
Where head_dim is no multiple of 16, plain torch calls run instead.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..attention_rows import AttentionRows, IntArray
from ..cpu import paged_attention as cpu
from .library import library

# A row in a segment has a partial result more to write and merge, which takes as long as the keys
# of some 16 to 32 tokens (an estimate by instruction counts).
SEGMENT_COST_TOKENS = 32
# Tokens of an item: with the 1 to 8 query heads that a KV head has, their sums and scores stay in a
# core's second-level cache, and packing a block of keys is paid once for all of them.
_MAX_ITEM_TOKENS = 64
# A lone row's keys are split where there are fewer units than this, into parts no shorter than that
# (guesses).
_FEW_UNITS = 8
_MIN_PART_KEYS = 512


class _Attention(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_stride", ctypes.c_int64),
        ("kv", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("items", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_items", ctypes.c_int64),
        ("partials", ctypes.c_void_p),
        ("merged_tokens", ctypes.c_void_p),
        ("merged_first", ctypes.c_void_p),
        ("merged_partials", ctypes.c_void_p),
        ("num_merged", ctypes.c_int64),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@dataclass(slots=True)
class _Items:
    """Columns of the items: token, num_tokens, first_slot, num_keys, num_visible."""

    parts: list[IntArray]
    slots: list[IntArray]
    num_slots: int = 0

    def add(self, table: IntArray, slots: IntArray) -> None:
        """Items whose first_slot counts from the beginning of `slots`."""
        table[:, 2] += self.num_slots
        self.parts.append(table)
        self.slots.append(slots)
        self.num_slots += len(slots)


class NativeAttentionPlan:
    """A step's work list, and the record of it that the C++ reads. I items, P partial results, M
    merged tokens.

    items [I, 6]: the columns of `_Items`, and the first token's partial or -1; slots [S];
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
        self.slots = np.ascontiguousarray(slots)
        self.merged = (merged_tokens, merged_first, merged_partials)
        self._partials: Tensor | None = None
        self._record = _Attention(
            items=self.items.ctypes.data,
            slots=self.slots.ctypes.data,
            num_items=len(self.items),
            merged_tokens=merged_tokens.ctypes.data,
            merged_first=merged_first.ctypes.data,
            merged_partials=merged_partials.ctypes.data,
            num_merged=len(merged_tokens),
        )
        self._address = ctypes.addressof(self._record)

    def run(self, q: Tensor, kv_layer: Tensor) -> Tensor:
        """One layer; what all layers share is written into the record by the first."""
        record = self._record
        if self._partials is None:
            self._set_shape(q, kv_layer)
        out = torch.empty((q.shape[0], q.shape[1], q.shape[2]), dtype=torch.bfloat16)
        record.q, record.q_stride = q.data_ptr(), q.stride(0)
        record.kv, record.out = kv_layer.data_ptr(), out.data_ptr()
        library().stemma_attention(self._address)
        return out

    def _set_shape(self, q: Tensor, kv_layer: Tensor) -> None:
        _, num_heads, head_dim = q.shape
        assert q.stride(2) == 1 and q.stride(1) == head_dim, "a token's heads are contiguous"
        num_floats = len(self.merged[2]) * num_heads * (head_dim + 2)
        self._partials = torch.empty(num_floats, dtype=torch.float32)
        record = self._record
        record.partials = self._partials.data_ptr()
        record.num_heads, record.num_kv_heads = num_heads, kv_layer.shape[1]
        record.num_slots, record.head_dim = kv_layer.shape[2], head_dim
        record.scale = head_dim**-0.5


def plan_attention(rows: AttentionRows, kv_layer: Tensor) -> object:
    _, num_kv_heads, _, head_dim = kv_layer.shape
    if head_dim % 16:
        return cpu.plan_attention(rows, kv_layer)
    return make_plan(rows, num_kv_heads)


def make_plan(rows: AttentionRows, num_kv_heads: int) -> NativeAttentionPlan:
    """The work list; `num_kv_heads` says how many units an item makes."""
    items = _Items([], [])
    own_start = rows.own_start()
    for segment in rows.segments.tolist():
        _add_segment(items, rows, *segment)
    num_queries = rows.num_queries
    for row in np.flatnonzero(num_queries > 1).tolist():
        _add_prefill(items, rows, row, int(own_start[row]))
    decode = np.flatnonzero(num_queries == 1).astype(np.int32)
    if len(decode):
        _add_decode(items, rows, decode, own_start[decode], num_kv_heads)
    table = np.concatenate(items.parts)
    return _with_partials(table, np.concatenate(items.slots), int(rows.query_start[-1]))


def paged_attention(q: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
    if isinstance(plan, cpu.CpuAttentionPlan):
        return cpu.paged_attention(q, kv_layer, plan)
    assert isinstance(plan, NativeAttentionPlan), "the plan comes from this backend"
    return plan.run(q, kv_layer)


def _add_segment(
    items: _Items, rows: AttentionRows, first: int, last: int, row_start: int, row_end: int
) -> None:
    token, token_end = int(rows.query_start[row_start]), int(rows.query_start[row_end])
    table = _token_tiles(token, token_end)
    table[:, 3] = table[:, 4] = last - first
    items.add(table, rows.slots(row_start, first, last))


def _add_prefill(items: _Items, rows: AttentionRows, row: int, own_start: int) -> None:
    token, token_end = int(rows.query_start[row]), int(rows.query_start[row + 1])
    seq_len = int(rows.seq_lens[row])
    table = _token_tiles(token, token_end)
    # Later tiles see more: they come first, so that no thread ends with a long one.
    num_seen = table[:, 0] - token + (seq_len - (token_end - token) - own_start) + 1
    table[:, 3] = num_seen + table[:, 1] - 1
    table[:, 4] = num_seen
    items.add(table[::-1].copy(), rows.slots(row, own_start, seq_len))


def _add_decode(
    items: _Items, rows: AttentionRows, decode: IntArray, own_start: IntArray, num_kv_heads: int
) -> None:
    lens = rows.seq_lens[decode] - own_start
    starts = np.zeros(len(lens), dtype=np.int32)
    np.cumsum(lens[:-1], out=starts[1:])
    row_of_key = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    places = np.arange(int(lens.sum()), dtype=np.int32) + (own_start - starts)[row_of_key]
    table_rows = decode[row_of_key]
    if rows.page_size == 1:
        slots = rows.page_table[table_rows, places]
    else:
        pages, offsets = np.divmod(places, np.int32(rows.page_size))
        slots = rows.page_table[table_rows, pages] * np.int32(rows.page_size) + offsets
    table = np.empty((len(lens), 6), dtype=np.int32)
    table[:, 0] = rows.query_start[decode]
    table[:, 1] = 1
    table[:, 2] = starts
    table[:, 3] = table[:, 4] = lens
    if len(lens) * num_kv_heads < _FEW_UNITS:
        table = _split_keys(table, -(-_FEW_UNITS // num_kv_heads))
    items.add(table, slots)


def _split_keys(table: IntArray, num_parts: int) -> IntArray:
    """Each item as up to `num_parts` items of parts of its keys."""
    parts = []
    for item in table:
        count = max(1, min(num_parts, int(item[3]) // _MIN_PART_KEYS))
        bounds = np.linspace(0, item[3], count + 1).astype(np.int32)
        split = np.tile(item, (count, 1))
        split[:, 2] += bounds[:-1]
        split[:, 3] = split[:, 4] = np.diff(bounds)
        parts.append(split)
    return np.concatenate(parts)


def _token_tiles(token: int, token_end: int) -> IntArray:
    """Items' columns, with tokens [token, token_end) cut into tiles of nearly equal size."""
    num_tokens = token_end - token
    num_tiles = -(-num_tokens // _MAX_ITEM_TOKENS)
    bounds = token + np.arange(num_tiles + 1, dtype=np.int64) * num_tokens // num_tiles
    table = np.zeros((num_tiles, 6), dtype=np.int32)
    table[:, 0] = bounds[:-1]
    table[:, 1] = np.diff(bounds)
    return table


def _with_partials(table: IntArray, slots: IntArray, num_tokens: int) -> NativeAttentionPlan:
    """Number the partial results of tokens that more than one item serves."""
    counts = table[:, 1]
    if int(counts.sum()) == num_tokens:
        table[:, 5] = -1
        return NativeAttentionPlan(table, slots, _NONE, np.zeros(1, dtype=np.int32), _NONE)
    item_of = np.repeat(np.arange(len(table), dtype=np.int32), counts)
    first_of = np.cumsum(counts, dtype=np.int32) - counts
    token_of = table[item_of, 0] + np.arange(len(item_of), dtype=np.int32) - first_of[item_of]
    num_serving = np.bincount(token_of, minlength=num_tokens)
    is_merged = num_serving[table[:, 0]] > 1  # of an item: all its tokens are, or none is
    table[:, 5] = np.where(is_merged, np.cumsum(counts * is_merged) - counts, -1)
    merged_tokens = np.flatnonzero(num_serving > 1).astype(np.int32)
    merged_first = np.zeros(len(merged_tokens) + 1, dtype=np.int32)
    np.cumsum(num_serving[merged_tokens], out=merged_first[1:])
    served = token_of[is_merged[item_of]]
    order = np.argsort(served, kind="stable").astype(np.int32)
    return NativeAttentionPlan(table, slots, merged_tokens, merged_first, order)


_NONE = np.zeros(0, dtype=np.int32)
