"""Paged attention on a CPU: KV is gathered into contiguous rows, then torch's flash kernel runs.

Rows with one query (decode) are taken together: their slots, padded to the longest, are computed
once a step, so a layer is one gather and one attention call for all of them. Rows with more
queries (prefill chunks) are taken one by one. The queries that share a KV head become the query
axis (decode) or read the same keys through a stride of 0 (prefill); `enable_gqa` would copy the
keys for each query head, 6 to 8 times slower here.

Cost O(padded keys) memory traffic for the gather, which a batch of very different lengths keeps
low by splitting into groups of similar length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_rows import AttentionRows, IntArray

# A second group costs a second call of about 30 us a layer, as much as gathering some 500 slots of
# 1 KiB (AMD EPYC, 2 threads): lengths are told apart only where padding wastes more than this, and
# more than a share of the whole (a guess).
_MAX_WASTED_SLOTS = 512
_MAX_WASTED_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each and similar lengths."""

    tokens: Tensor | None  # [num_rows] int64, places on the token axis; None: all, in order
    num_rows: int
    slots: Tensor  # [num_rows * longest] int32
    is_visible: Tensor | None  # [num_rows, 1, 1, longest] bool; None: all


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One row with several queries."""

    tokens: slice
    slots: Tensor  # [num_keys] int32
    is_visible: Tensor | None  # [num_queries, num_keys] bool; None: as many queries as keys


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """A step's rows as the two kinds of call."""

    decode_groups: tuple[_DecodeGroup, ...]
    prefill_rows: tuple[_PrefillRow, ...]


def plan_attention(rows: AttentionRows) -> CpuAttentionPlan:
    num_queries = rows.num_queries
    decode = np.flatnonzero(num_queries == 1).astype(np.int32)
    groups = [_plan_group(rows, group) for group in _by_length(decode, rows.seq_lens)]
    prefill = [_plan_prefill(rows, int(row)) for row in np.flatnonzero(num_queries > 1)]
    return CpuAttentionPlan(tuple(groups), tuple(prefill))


def paged_attention(q: Tensor, kv_layer: Tensor, plan: object) -> Tensor:
    assert isinstance(plan, CpuAttentionPlan), "the plan comes from this backend's plan_attention"
    groups, prefill_rows = plan.decode_groups, plan.prefill_rows
    if len(groups) == 1 and not prefill_rows and groups[0].tokens is None:
        return _decode(q, kv_layer, groups[0])
    out = torch.empty(q.shape, dtype=q.dtype)
    for group in groups:
        # NOTE: a single group of a mixed step still has `tokens`; None means every token.
        assert group.tokens is not None
        out.index_copy_(0, group.tokens, _decode(q[group.tokens], kv_layer, group))
    for row in prefill_rows:
        out[row.tokens] = _prefill(q[row.tokens], kv_layer, row)
    return out


def _by_length(rows: IntArray, seq_lens: IntArray) -> list[IntArray]:
    """Split rows into groups whose padding is worth less than another call."""
    if not len(rows):
        return []
    lens = seq_lens[rows].astype(np.int64)
    allowed = max(_MAX_WASTED_SLOTS, int(_MAX_WASTED_SHARE * int(lens.sum())))
    if int(lens.max()) * len(rows) - int(lens.sum()) <= allowed:
        return [rows]
    order = np.argsort(-lens, kind="stable")
    lens = lens[order]
    groups, first = [], 0
    while first < len(rows):
        wasted = np.cumsum(lens[first] - lens[first:])
        last = first + int(np.searchsorted(wasted, allowed, side="right"))
        groups.append(rows[order[first:last]])
        first = last
    return groups


def _plan_group(rows: AttentionRows, group: IntArray) -> _DecodeGroup:
    slots = rows.padded_slots(group)
    lens = rows.seq_lens[group]
    longest = slots.shape[1]
    is_visible = None
    if int(lens.min()) < longest:
        visible = np.arange(longest, dtype=np.int32) < lens[:, None]
        is_visible = torch.from_numpy(visible)[:, None, None, :]
    tokens: npt.NDArray[np.int64] = rows.query_start[group].astype(np.int64)
    is_all = len(group) == int(rows.query_start[-1]) and bool((np.diff(tokens) == 1).all())
    return _DecodeGroup(
        tokens=None if is_all else torch.from_numpy(tokens),
        num_rows=len(group),
        slots=torch.from_numpy(slots.reshape(-1)),
        is_visible=is_visible,
    )


def _plan_prefill(rows: AttentionRows, row: int) -> _PrefillRow:
    tokens = slice(int(rows.query_start[row]), int(rows.query_start[row + 1]))
    slots = torch.from_numpy(rows.padded_slots(np.array([row], dtype=np.int32))[0])
    num_queries, num_keys = tokens.stop - tokens.start, len(slots)
    is_visible = None
    if num_queries < num_keys:
        is_visible = torch.ones(num_queries, num_keys, dtype=torch.bool)
        is_visible.tril_(num_keys - num_queries)
    return _PrefillRow(tokens, slots, is_visible)


def _decode(q: Tensor, kv_layer: Tensor, group: _DecodeGroup) -> Tensor:
    """q [R, H, D], one query a row -> [R, H, D]."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    kv = kv_layer.index_select(0, group.slots)
    kv = kv.view(num_rows, -1, 2, num_kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    grouped = q.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, kv[0], kv[1], attn_mask=group.is_visible)
    return out.reshape(num_rows, num_heads, head_dim)


def _prefill(q: Tensor, kv_layer: Tensor, row: _PrefillRow) -> Tensor:
    """q [L, H, D] of one row -> [L, H, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[2]
    num_groups = num_heads // num_kv_heads
    kv = kv_layer.index_select(0, row.slots).permute(1, 2, 0, 3)
    shared = kv[:, :, None].expand(2, num_kv_heads, num_groups, -1, head_dim)
    grouped = q.view(num_queries, num_kv_heads, num_groups, head_dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(
        grouped, shared[0], shared[1], row.is_visible, is_causal=row.is_visible is None
    )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)
