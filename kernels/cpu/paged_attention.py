"""Paged attention on a CPU: KV is gathered head by head, then batched matrix products run over it.

Rows with one query (decode) are batched: a layer is one gather and two batched products for all of
them, in which the queries that share a KV head are the rows of one product. Rows with more queries
(prefill chunks) are computed one by one, in blocks of queries, each over the keys up to its last
one. Everything is in float32 or better and the result is rounded once: with products in bfloat16 a
score of 20 was off by up to 1/16, and log-probabilities by a third more (stemma-tiny). On CPUs
without AVX512-BF16 torch's products of bfloat16 are 3 to 40 times slower, too (32 rows of 320 keys:
14.7 ms, in float32 5.5 ms; a prompt of 512: 41.6 ms and 0.9 ms).

A segment that rows share is gathered once, and one product for each KV head runs over it for all
their queries; parts of a token are merged by their log-sum-exps (Milakov and Gimelshein 2018).

Why not torch's own kernel: measured on one core of an AMD EPYC (torch 2.13, bfloat16, 12 query and
4 KV heads of 64), scaled_dot_product_attention needs 2.5 to 4.7 ms for 32 decode rows of 320 keys
where the two products and the softmax need 0.6 ms, 11.7 ms against 4.7 ms for a prompt of 512, and
with `enable_gqa` it copies the keys for each query head, 6 to 8 times slower still.

With a window a row's keys are gathered from the first that one of its queries sees (plus its
sinks), and blocks of queries use their part of them. Quantized keys and values are dequantized when
gathered.

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

from ..attention_rows import AttentionRows, IntArray
from ..chunked_rows import in_chunks
from ..model_options import DEFAULT_OPTIONS, AttentionOptions
from ..ops import KVLayer
from ..quantized_tensors import head_dim_of
from ..reference.dense import widen
from ..reference.kv_store import dequantized
from ..visible_keys import VisibleKeys, visible_keys

# A second group costs more calls, some 40 us a layer, as much as gathering some 500 slots of 1 KiB
# (AMD EPYC): rows are grouped by length only if padding wastes more than this, and more than a
# share of the whole (a guess).
_MAX_WASTED_SLOTS = 512
_MAX_WASTED_SHARE = 0.125
# Up to this many keys in all, torch's kernel is faster because it is one call: at one row of 300
# keys 39 us against 76 us, at 1,000 keys slower (one core of an AMD EPYC beside a busy process).
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
    is_hidden: Tensor | None  # [num_rows, 1, 1, longest] bool; None: nothing is hidden


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Consecutive queries of a row and the run of keys that any of them sees."""

    queries: slice
    keys: slice
    is_hidden: Tensor  # [num_queries, any] bool, for the last columns of the keys


@dataclass(frozen=True, slots=True)
class _PrefillRow:
    """One row with several queries."""

    tokens: slice
    places: Tensor  # [2 * num_kv_heads * num_keys] int64
    blocks: tuple[_QueryBlock, ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    """KV that all queries of consecutive rows see."""

    tokens: slice
    places: Tensor  # [2 * num_kv_heads * num_keys] int64


@dataclass(frozen=True, slots=True)
class CpuAttentionPlan:
    """A step's rows by kind of call: each row's own KV, then the shared KV."""

    decode_groups: tuple[_DecodeGroup, ...]
    prefill_rows: tuple[_PrefillRow, ...]
    segments: tuple[_Segment, ...]
    scale: float
    soft_cap: float | None


@dataclass(slots=True)
class _Parts:
    """Attention over part of each token's KV; parts of the same token are merged."""

    out: Tensor  # [T, H, D], float32 or better
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

    def add_sinks(self, sink_logits: Tensor) -> None:
        """Add a part without values, of lse sink_logits [H], to all tokens' results."""
        assert self.lse is not None
        self.out.mul_((self.lse - sink_logits).sigmoid_()[..., None])


def plan_attention(
    rows: AttentionRows,
    kv_layer: KVLayer,
    num_heads: int,
    options: AttentionOptions = DEFAULT_OPTIONS,
    padded_tokens: int | None = None,
) -> object:
    rows = in_chunks(rows, options.chunk)
    keys = visible_keys(rows, options)
    shape = _values(kv_layer).shape
    num_queries = rows.num_queries
    decode = np.flatnonzero(num_queries == 1).astype(np.int32)
    groups = [_plan_group(rows, keys, part, shape) for part in by_length(decode, _lens(rows, keys))]
    prefill = [
        _plan_prefill(rows, keys, row, options, shape)
        for row in np.flatnonzero(num_queries > 1).tolist()
    ]
    segments = [
        _Segment(
            tokens=slice(int(rows.query_start[row_start]), int(rows.query_start[row_end])),
            places=_places(rows.slots(row_start, first, last)[None], shape),
        )
        for first, last, row_start, row_end in keys.segments.tolist()
    ]
    scale = head_dim_of(kv_layer) ** -0.5 if options.scale is None else options.scale
    return CpuAttentionPlan(tuple(groups), tuple(prefill), tuple(segments), scale, options.soft_cap)


def paged_attention(
    q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
) -> Tensor:
    assert isinstance(plan, CpuAttentionPlan), "the plan comes from this backend's plan_attention"
    groups, prefill_rows = plan.decode_groups, plan.prefill_rows
    needs_lse = bool(plan.segments) or sink_logits is not None
    if len(groups) == 1 and groups[0].tokens is None and not needs_lse:
        return _decode(widen(q), kv_layer, plan, groups[0], None).to(q.dtype)
    dtype = q.dtype
    q = widen(q)
    parts = _Parts(torch.empty_like(q, memory_format=torch.contiguous_format), None)
    if needs_lse:
        parts.lse = q.new_empty(q.shape[:2])
    for group in groups:
        tokens = slice(None) if group.tokens is None else group.tokens
        lse = None if parts.lse is None else parts.lse[tokens].contiguous()
        parts.out[tokens] = _decode(q[tokens], kv_layer, plan, group, lse)
        if parts.lse is not None and lse is not None:
            parts.lse[tokens] = lse
    for row in prefill_rows:
        lse = None if parts.lse is None else parts.lse[row.tokens]
        _prefill(q[row.tokens], kv_layer, plan, row, parts.out[row.tokens], lse)
    for segment in plan.segments:
        parts.merge(segment.tokens, *_attend_segment(q[segment.tokens], kv_layer, plan, segment))
    if sink_logits is not None:
        parts.add_sinks(sink_logits)
    return parts.out.to(dtype)


def by_length(rows: IntArray, lens_of_rows: IntArray) -> list[IntArray]:
    """Split rows into groups whose padding costs less than another call. lens_of_rows: of all."""
    if not len(rows):
        return []
    lens = lens_of_rows[rows].astype(np.int64)
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


def _lens(rows: AttentionRows, keys: VisibleKeys) -> IntArray:
    """Keys that each row reads on its own, [num_rows]."""
    alone: IntArray = keys.num_sinks + keys.shared_start - keys.first
    return alone + rows.seq_lens - keys.own_start


def _plan_group(
    rows: AttentionRows, keys: VisibleKeys, group: IntArray, shape: torch.Size
) -> _DecodeGroup:
    lens = _lens(rows, keys)[group]
    slots = _decode_slots(rows, keys, group, lens)
    longest = slots.shape[1]
    is_hidden = None
    if int(lens.min()) < longest:
        hidden = np.arange(longest, dtype=np.int32) >= lens[:, None]
        is_hidden = torch.from_numpy(hidden)[:, None, None, :]
    tokens: npt.NDArray[np.int64] = rows.query_start[group].astype(np.int64)
    is_all = len(group) == int(rows.query_start[-1]) and bool((np.diff(tokens) == 1).all())
    return _DecodeGroup(
        tokens=None if is_all else torch.from_numpy(tokens),
        places=_places(slots, shape),
        is_hidden=is_hidden,
    )


def _decode_slots(
    rows: AttentionRows, keys: VisibleKeys, group: IntArray, lens: IntArray
) -> IntArray:
    """[len(group), longest]: the rows' runs, concatenated and padded with one of their slots."""
    own_start, first = keys.own_start[group, None], keys.first[group, None]
    own_end = rows.seq_lens[group, None] - own_start
    if bool((lens == own_end[:, 0]).all()):
        return rows.padded_slots(group, keys.own_start[group])
    place = np.arange(int(lens.max()), dtype=np.int32)[None]
    behind_sinks = place - keys.num_sinks[group, None]
    own = behind_sinks - (keys.shared_start[group, None] - first)
    other = np.where(behind_sinks < 0, place, first + behind_sinks)
    own_tokens = own_start + np.where(own < own_end, own, 0)
    last = rows.seq_lens[group, None] - 1  # for a row that has only sinks
    return rows.slots_of(group, np.minimum(np.where(own < 0, other, own_tokens), last))


def _plan_prefill(
    rows: AttentionRows, keys: VisibleKeys, row: int, options: AttentionOptions, shape: torch.Size
) -> _PrefillRow:
    first, seq_len = int(rows.query_start[row]), int(rows.seq_lens[row])
    num_queries = int(rows.query_start[row + 1]) - first
    runs = (
        (0, int(keys.num_sinks[row])),
        (int(keys.first[row]), int(keys.shared_start[row])),
        (int(keys.own_start[row]), seq_len),
    )
    slots = np.concatenate([rows.slots(row, *run) for run in runs])
    tokens = np.concatenate([np.arange(*run, dtype=np.int32) for run in runs])
    positions = np.arange(seq_len - num_queries, seq_len, dtype=np.int32)
    blocks = [
        _plan_block(tokens, positions, start, options)
        for start in range(0, num_queries, _QUERY_BLOCK)
    ]
    places = _places(slots[None], shape)
    return _PrefillRow(slice(first, first + num_queries), places, tuple(blocks))


def _plan_block(
    tokens: IntArray, positions: IntArray, start: int, options: AttentionOptions
) -> _QueryBlock:
    """tokens [num_keys], ascending: of the row's keys; positions: of its queries."""
    queries = slice(start, min(start + _QUERY_BLOCK, len(positions)))
    query = positions[queries, None]
    end = int(np.searchsorted(tokens, query[-1, 0], side="right"))
    if options.window is None:
        hidden = tokens[end - len(query) : end] > query  # only among the queries' own keys
        return _QueryBlock(queries, slice(0, end), torch.from_numpy(hidden))
    first_seen = int(query[0, 0]) - options.window + 1
    begin = 0 if options.num_sink_tokens else int(np.searchsorted(tokens, first_seen))
    key = tokens[begin:end]
    is_past = (key <= query - options.window) & (key >= options.num_sink_tokens)
    return _QueryBlock(queries, slice(begin, end), torch.from_numpy((key > query) | is_past))


def _places(slots: IntArray, shape: torch.Size) -> Tensor:
    """Rows of values.view(-1, head_dim) that hold `slots` [num_rows, num_keys], in the order
    [2, num_rows, num_kv_heads, num_keys], flat; shape: of the values."""
    _, num_kv_heads, num_slots, _ = shape
    first = np.arange(2 * num_kv_heads).reshape(2, 1, num_kv_heads, 1) * num_slots
    return torch.from_numpy((first + slots[:, None, :]).reshape(-1))


def _values(kv_layer: KVLayer) -> Tensor:
    return kv_layer if isinstance(kv_layer, Tensor) else kv_layer.values


def _gather(
    kv_layer: KVLayer, places: Tensor, num_batches: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values in `dtype`, each [num_batches, num_keys, head_dim], contiguous."""
    values = _values(kv_layer)
    if isinstance(kv_layer, Tensor):
        rows = values.view(-1, values.shape[-1]).index_select(0, places)
    else:  # as bytes: torch gathers no 8-bit floats
        numbers = values.view(torch.uint8).view(-1, values.shape[-1]).index_select(0, places)
        scales = kv_layer.scales.flatten(0, 2).index_select(0, places)
        rows = dequantized(numbers.view(values.dtype), scales)
    kv = rows.to(dtype).view(2, num_batches, -1, rows.shape[-1])
    return kv[0], kv[1]


def _decode(
    q: Tensor, kv_layer: KVLayer, plan: CpuAttentionPlan, group: _DecodeGroup, lse: Tensor | None
) -> Tensor:
    """q [R, H, D], one query a row -> [R, H, D]; fills lse [R, H] if given."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = _values(kv_layer).shape[1]
    num_batches = num_rows * num_kv_heads
    keys, values = _gather(kv_layer, group.places, num_batches, q.dtype)
    is_plain = group.is_hidden is None and lse is None and plan.soft_cap is None
    if is_plain and num_rows * keys.shape[1] <= _FEW_KEYS:
        return _decode_few(q, keys, values, plan.scale)
    scaled = (q * plan.scale).view(num_batches, num_heads // num_kv_heads, head_dim)
    scores = _scores(scaled, keys, plan)
    if group.is_hidden is not None:
        scores.view(num_rows, num_kv_heads, -1, keys.shape[1]).masked_fill_(
            group.is_hidden, -torch.inf
        )
    if lse is not None:
        torch.logsumexp(scores.view(num_rows, num_heads, -1), -1, out=lse)
    return torch.bmm(scores.softmax(-1), values).view(num_rows, num_heads, head_dim)


def _decode_few(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """q [R, H, D], keys and values [R * KV, S, D] -> [R, H, D], in one call.

    Passes four axes, as torch's flash kernel needs (with three, a slower path runs).
    """
    grouped = q.reshape(1, len(keys), -1, q.shape[-1])
    attended = F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
    return attended.reshape(q.shape)


def _prefill(
    q: Tensor,
    kv_layer: KVLayer,
    plan: CpuAttentionPlan,
    row: _PrefillRow,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """q, out [L, H, D] of one row; fills lse [L, H] if given."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = _values(kv_layer).shape[1]
    keys, values = _gather(kv_layer, row.places, num_kv_heads, q.dtype)
    grouped_out = _by_kv_head(out, num_kv_heads)
    scaled = _by_kv_head(q * plan.scale, num_kv_heads)
    for part in row.blocks:
        size, num_keys = len(part.is_hidden), part.keys.stop - part.keys.start
        block = scaled[:, :, part.queries].reshape(num_kv_heads, -1, head_dim)
        scores = _scores(block, keys[:, part.keys], plan)
        edge = scores.view(num_kv_heads, -1, size, num_keys)[..., -part.is_hidden.shape[1] :]
        edge.masked_fill_(part.is_hidden, -torch.inf)
        attended = torch.bmm(scores.softmax(-1), values[:, part.keys])
        grouped_out[:, :, part.queries] = attended.view(num_kv_heads, -1, size, head_dim)
        if lse is not None:
            of_block = scores.logsumexp(-1).view(num_heads, size)
            lse[part.queries] = of_block.T


def _attend_segment(
    q: Tensor, kv_layer: KVLayer, plan: CpuAttentionPlan, segment: _Segment
) -> tuple[Tensor, Tensor]:
    """q [L, H, D], every query sees the whole segment -> [L, H, D] and lse [L, H]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = _values(kv_layer).shape[1]
    keys, values = _gather(kv_layer, segment.places, num_kv_heads, q.dtype)
    scaled = _by_kv_head(q * plan.scale, num_kv_heads).reshape(num_kv_heads, -1, head_dim)
    scores = _scores(scaled, keys, plan)
    lse = scores.logsumexp(-1)
    attended = torch.bmm((scores - lse[..., None]).exp_(), values)
    out = attended.view(num_heads, num_queries, head_dim).transpose(0, 1)
    return out, lse.view(num_heads, num_queries).T


def _scores(scaled: Tensor, keys: Tensor, plan: CpuAttentionPlan) -> Tensor:
    """[B, M, D] x [B, S, D] -> [B, M, S], contiguous."""
    scores = torch.bmm(scaled, keys.transpose(1, 2))
    if plan.soft_cap is None:
        return scores
    return scores.div_(plan.soft_cap).tanh_().mul_(plan.soft_cap)


def _by_kv_head(heads: Tensor, num_kv_heads: int) -> Tensor:
    """[L, H, D] -> [KV, H / KV, L, D], a view."""
    return heads.view(len(heads), num_kv_heads, -1, heads.shape[-1]).permute(1, 2, 0, 3)
