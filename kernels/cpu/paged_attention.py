"""Paged attention on a CPU: KV is gathered head by head, then batched matrix products run over it.

Rows with one query (decode) are taken together: a layer is one gather and two batched products for
all of them, in which the queries that share a KV head are the rows of one product. Rows with more
queries (prefill chunks) are taken one by one, in blocks of queries, each over the keys up to its
last one. Products are in the tensors' dtype, the softmax in float32 or better.

A segment that rows share is gathered once, and one product for each KV head runs over it for all
their queries; parts of a token are merged by their log-sum-exps (Milakov and Gimelshein 2018).

Why not torch's own kernel: measured on one core of an AMD EPYC (torch 2.13, bfloat16, 12 query and
4 KV heads of 64), scaled_dot_product_attention needs 2.5 to 4.7 ms for 32 decode rows of 320 keys
where the two products and the softmax need 0.6 ms, 11.7 ms against 4.7 ms for a prompt of 512, and
with `enable_gqa` it copies the keys for each query head, 6 to 8 times slower still.

Cost of a gather: O(padded keys) of memory traffic, which a batch of very different lengths keeps
low by splitting into groups of similar length. The places to gather are computed once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_options import DEFAULT_OPTIONS, AttentionOptions
from ..attention_rows import AttentionRows, IntArray
from ..ops import KVLayer

# A second group costs more calls, some 40 us a layer, as much as gathering some 500 slots of 1 KiB
# (AMD EPYC): lengths are told apart only where padding wastes more than this, and more than a
# share of the whole (a guess).
_MAX_WASTED_SLOTS = 512
_MAX_WASTED_SHARE = 0.125
# Up to so many keys in all, torch's kernel is ahead because it is one call: at one row of 300 keys
# 39 us against 76 us, at 1,000 keys behind (one core of an AMD EPYC beside a busy process).
_FEW_KEYS = 384
# The gathered copy of a group stays below this, 64 MiB at 4 KV heads of 64 in bfloat16 (a guess).
_MAX_GROUP_SLOTS = 65536
# A segment costs some ten calls a layer; a row in it, a share of them and of the merge (a guess).
SEGMENT_COST_TOKENS = 64
# Queries of a prefill block; 64 and 128 are equally fast, smaller ones waste less on the diagonal.
_QUERY_BLOCK = 64


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each and similar lengths."""

    tokens: Tensor | None  # [num_rows] int64, places on the token axis; None: all, in order
    places: Tensor  # [2 * num_rows * num_kv_heads * longest] int64, see `_places`
    is_hidden: Tensor | None  # [num_rows, 1, 1, longest] bool; None: nothing is


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One row with several queries."""

    tokens: slice
    places: Tensor  # [2 * num_kv_heads * num_keys] int64


@dataclass(frozen=True, slots=True)
class _Segment:
    """KV that the queries of consecutive rows all see."""

    tokens: slice
    places: Tensor  # [2 * num_kv_heads * num_keys] int64


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """A step's rows as the kinds of call: each row's own KV, then what rows share."""

    decode_groups: tuple[_DecodeGroup, ...]
    prefill_rows: tuple[_PrefillRow, ...]
    segments: tuple[_Segment, ...]
    is_future: Tensor  # [_QUERY_BLOCK, _QUERY_BLOCK] bool, above the diagonal


@dataclass(slots=True)
class _Parts:
    """Attention over part of each token's KV; parts of the same token are merged."""

    out: Tensor  # [T, H, D]; float32 or better where parts will be merged
    lse: Tensor | None  # [T, H] log of the sum of exponentials; None: nothing will be merged

    def merge(self, tokens: slice, out: Tensor, lse: Tensor) -> None:
        """Add a part [L, H, D] with its lse [L, H] to the tokens' results."""
        assert self.lse is not None
        before = self.lse[tokens]
        total = torch.logaddexp(before, lse)
        so_far = self.out[tokens]
        so_far.mul_((before - total).exp_()[..., None])
        so_far.add_(out * (lse - total).exp_()[..., None])
        before.copy_(total)


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> CpuAttentionPlan:
    assert options == DEFAULT_OPTIONS and isinstance(kv_layer, Tensor), "not on a CPU yet"
    num_queries, own_start = rows.num_queries, rows.own_start()
    decode = np.flatnonzero(num_queries == 1).astype(np.int32)
    groups = [
        _plan_group(rows, own_start, part, kv_layer)
        for part in _by_length(decode, rows.seq_lens - own_start)
    ]
    prefill = [
        _PrefillRow(
            tokens=slice(int(rows.query_start[row]), int(rows.query_start[row + 1])),
            places=_places(
                rows.slots(row, int(own_start[row]), int(rows.seq_lens[row]))[None], kv_layer
            ),
        )
        for row in np.flatnonzero(num_queries > 1).tolist()
    ]
    segments = [
        _Segment(
            tokens=slice(int(rows.query_start[row_start]), int(rows.query_start[row_end])),
            places=_places(rows.slots(row_start, first, last)[None], kv_layer),
        )
        for first, last, row_start, row_end in rows.segments.tolist()
    ]
    is_future = torch.ones(_QUERY_BLOCK, _QUERY_BLOCK, dtype=torch.bool).triu_(1)
    return CpuAttentionPlan(tuple(groups), tuple(prefill), tuple(segments), is_future)


def paged_attention(q: Tensor, kv_layer: KVLayer, plan: object) -> Tensor:
    assert isinstance(kv_layer, Tensor)
    assert isinstance(plan, CpuAttentionPlan), "the plan comes from this backend's plan_attention"
    groups, prefill_rows = plan.decode_groups, plan.prefill_rows
    if len(groups) == 1 and groups[0].tokens is None and not plan.segments:
        return _decode(q, kv_layer, groups[0], None)
    parts = _Parts(torch.empty(q.shape, dtype=q.dtype), None)
    if plan.segments:
        wide_dtype = torch.promote_types(q.dtype, torch.float32)
        parts.out = torch.empty(q.shape, dtype=wide_dtype)
        parts.lse = torch.empty(q.shape[:2], dtype=wide_dtype)
    for group in groups:
        tokens = slice(None) if group.tokens is None else group.tokens
        lse = None if parts.lse is None else parts.lse[tokens].contiguous()
        parts.out[tokens] = _decode(q[tokens], kv_layer, group, lse).to(parts.out.dtype)
        if parts.lse is not None and lse is not None:
            parts.lse[tokens] = lse
    for row in prefill_rows:
        lse = None if parts.lse is None else parts.lse[row.tokens]
        _prefill(q[row.tokens], kv_layer, row, plan.is_future, parts.out[row.tokens], lse)
    for segment in plan.segments:
        parts.merge(segment.tokens, *_attend_segment(q[segment.tokens], kv_layer, segment))
    return parts.out.to(q.dtype)


def _by_length(rows: IntArray, own_lens: IntArray) -> list[IntArray]:
    """Split rows into groups whose padding is worth less than another call."""
    if not len(rows):
        return []
    lens = own_lens[rows].astype(np.int64)
    longest, total = int(lens.max()), int(lens.sum())
    allowed = max(_MAX_WASTED_SLOTS, int(_MAX_WASTED_SHARE * total))
    if longest * len(rows) <= min(total + allowed, _MAX_GROUP_SLOTS):
        return [rows]
    order = np.argsort(-lens, kind="stable")
    lens = lens[order]
    groups, first = [], 0
    while first < len(rows):
        wasted = np.cumsum(lens[first] - lens[first:])
        fitting = max(1, _MAX_GROUP_SLOTS // int(lens[first]))
        size = min(int(np.searchsorted(wasted, allowed, side="right")), fitting)
        groups.append(rows[order[first : first + size]])
        first += size
    return groups


def _plan_group(
    rows: AttentionRows, own_start: IntArray, group: IntArray, kv_layer: Tensor
) -> _DecodeGroup:
    slots = rows.padded_slots(group, own_start[group])
    lens = rows.seq_lens[group] - own_start[group]
    longest = slots.shape[1]
    is_hidden = None
    if int(lens.min()) < longest:
        hidden = np.arange(longest, dtype=np.int32) >= lens[:, None]
        is_hidden = torch.from_numpy(hidden)[:, None, None, :]
    tokens: npt.NDArray[np.int64] = rows.query_start[group].astype(np.int64)
    is_all = len(group) == int(rows.query_start[-1]) and bool((np.diff(tokens) == 1).all())
    return _DecodeGroup(
        tokens=None if is_all else torch.from_numpy(tokens),
        places=_places(slots, kv_layer),
        is_hidden=is_hidden,
    )


def _places(slots: IntArray, kv_layer: Tensor) -> Tensor:
    """Rows of kv_layer.view(-1, head_dim) that hold `slots` [num_rows, num_keys], in the order
    [2, num_rows, num_kv_heads, num_keys], flat."""
    _, num_kv_heads, num_slots, _ = kv_layer.shape
    first = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1) * num_slots
    return torch.from_numpy((first + slots[:, None, :]).reshape(-1))


def _gather(kv_layer: Tensor, places: Tensor, num_batches: int) -> tuple[Tensor, Tensor]:
    """Keys and values, each [num_batches, num_keys, head_dim], contiguous."""
    head_dim = kv_layer.shape[-1]
    kv = kv_layer.view(-1, head_dim).index_select(0, places).view(2, num_batches, -1, head_dim)
    return kv[0], kv[1]


def _decode(q: Tensor, kv_layer: Tensor, group: _DecodeGroup, lse: Tensor | None) -> Tensor:
    """q [R, H, D], one query a row -> [R, H, D]; fills lse [R, H] where it is asked for."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[1]
    num_batches = num_rows * num_kv_heads
    keys, values = _gather(kv_layer, group.places, num_batches)
    if group.is_hidden is None and lse is None and num_rows * keys.shape[1] <= _FEW_KEYS:
        return _decode_few(q, keys, values)
    scaled = (q * head_dim**-0.5).view(num_batches, num_heads // num_kv_heads, head_dim)
    scores = torch.bmm(scaled, keys.transpose(1, 2))
    if group.is_hidden is not None:
        scores.view(num_rows, num_kv_heads, -1, keys.shape[1]).masked_fill_(
            group.is_hidden, -torch.inf
        )
    if lse is not None:
        torch.logsumexp(_widened(scores).view(num_rows, num_heads, -1), -1, out=lse)
    return torch.bmm(_softmax(scores), values).view(num_rows, num_heads, head_dim)


def _decode_few(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [R, H, D], keys and values [R * KV, S, D] -> [R, H, D], in one call.

    Four axes in, as torch's flash kernel takes no fewer (with three, a slower path runs).
    """
    grouped = q.reshape(1, len(keys), -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, keys[None], values[None]).reshape(q.shape)


def _prefill(
    q: Tensor,
    kv_layer: Tensor,
    row: _PrefillRow,
    is_future: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """q, out [L, H, D] of one row; fills lse [L, H] where it is asked for."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[1]
    keys, values = _gather(kv_layer, row.places, num_kv_heads)
    num_before = keys.shape[1] - num_queries
    grouped_out = _by_kv_head(out, num_kv_heads)
    scaled = _by_kv_head(q * head_dim**-0.5, num_kv_heads)
    for first in range(0, num_queries, _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, num_queries)
        size, end = last - first, num_before + last
        block = scaled[:, :, first:last].reshape(num_kv_heads, -1, head_dim)
        scores = torch.bmm(block, keys[:, :end].transpose(1, 2))
        diagonal = scores.view(num_kv_heads, -1, size, end)[..., end - size :]
        diagonal.masked_fill_(is_future[:size, :size], -torch.inf)
        attended = torch.bmm(_softmax(scores), values[:, :end])
        grouped_out[:, :, first:last] = attended.view(num_kv_heads, -1, size, head_dim)
        if lse is not None:
            of_block = _widened(scores).logsumexp(-1).view(num_heads, size)
            lse[first:last] = of_block.T


def _attend_segment(q: Tensor, kv_layer: Tensor, segment: _Segment) -> tuple[Tensor, Tensor]:
    """q [L, H, D], every query sees all of the segment -> [L, H, D] and lse [L, H], widened."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[1]
    keys, values = _gather(kv_layer, segment.places, num_kv_heads)
    scaled = _by_kv_head(q * head_dim**-0.5, num_kv_heads).reshape(num_kv_heads, -1, head_dim)
    scores = _widened(torch.bmm(scaled, keys.transpose(1, 2)))
    lse = scores.logsumexp(-1)
    attended = torch.bmm((scores - lse[..., None]).exp_().to(values.dtype), values)
    out = attended.view(num_heads, num_queries, head_dim).transpose(0, 1)
    return _widened(out), lse.view(num_heads, num_queries).T


def _by_kv_head(heads: Tensor, num_kv_heads: int) -> Tensor:
    """[L, H, D] -> [KV, H / KV, L, D], a view."""
    return heads.view(len(heads), num_kv_heads, -1, heads.shape[-1]).permute(1, 2, 0, 3)


def _widened(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _softmax(scores: Tensor) -> Tensor:
    """Over the last axis, in float32 or better, back in the scores' dtype."""
    if scores.dtype in (torch.float32, torch.float64):
        return scores.softmax(-1)
    return scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
