"""Attention of sequences whose KV is divided between ranks, by pages (context parallelism).

Queries travel, KV stays (Yang et al., "Context Parallelism for Scalable Million-Token Inference",
2024, "pass-Q"): with a prefix in the cache, and in every step of decoding, queries are far smaller.
Each rank has the queries of all tokens and attends with them to the keys that it has, hidden by
their positions; so prefixes, chunks and drafts are one case, and each rank has the same work,
however tokens are divided. Then each rank merges, for its own tokens, the parts of all ranks by
their log-sum-exps (Milakov and Gimelshein 2018), in the order of the ranks.

Keys that all queries of a row see, of rows with one query and prefixes of others, go through the
compiled kernels where there are any; the rest, a chunk's own keys, through torch's calls on a CPU:
in float32 or wider, and rounded once. Segments are not used: a rank's part of one is short.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .attention_rows import AttentionRows, IntArray
from .context_share import PageShare, TokenShare, all_gather
from .cpu.paged_attention import by_length
from .model_options import DEFAULT_OPTIONS, AttentionOptions
from .native.partial_attention import PartialAttention, Run, takes
from .ops import Communicator, KVLayer
from .quantized_tensors import QuantizedKV
from .reference.dense import widen
from .reference.kv_store import dequantized
from .registry import KernelChoice, Kernels

# Of a block of a row with several queries: its scores are in memory at once, with 32 heads in
# float32 32 MB (guesses).
_BLOCK_QUERIES, _BLOCK_KEYS = 128, 2048
_NO_SEGMENT_PAYS = 1 << 30
_DIVIDED = ("paged_attention", "prefill_attention", "latent_attention")  # as the doctor names them


def with_divided_attention(kernels: Kernels, communicator: Communicator) -> Kernels:
    """The kernels, with attention that takes the queries of all tokens of a step and returns the
    results of this rank's (`TokenShare`), as rows name pages of all ranks (`PageShare`)."""
    is_native = any(
        choice.op == _DIVIDED[0] and choice.implementation == "native" for choice in kernels.choices
    )
    divided = _DividedAttention(communicator, is_native)
    own = ("torch", "the KV is divided between ranks")
    choices = tuple(
        KernelChoice(choice.op, *own) if choice.op in _DIVIDED else choice
        for choice in kernels.choices
    )
    return replace(
        kernels,
        plan_attention=divided.plan,
        paged_attention=divided.attend,
        plan_latent_attention=divided.plan_latent,
        latent_attention=divided.attend_latent,
        capture=None,  # it exchanges outside of kernels
        segment_cost_tokens=_NO_SEGMENT_PAYS,
        latent_segment_cost_tokens=_NO_SEGMENT_PAYS,
        choices=choices,
    )


_Keys = tuple[IntArray, IntArray]
"""Their positions in a row, ascending, and their slots."""


@dataclass(frozen=True, slots=True)
class _Block:
    """R rows' L queries each, and K of the keys that are here of each row. Shorter rows repeat a
    key."""

    tokens: Tensor  # [R * L] int64, on the step's token axis
    slots: Tensor  # [R * K] int64
    is_hidden: Tensor  # [R, 1, L, K] bool
    num_rows: int
    is_more: bool = False  # its tokens have a block before this one


@dataclass(frozen=True, slots=True)
class _Plan:
    """Tokens in no block see no key that is here."""

    blocks: tuple[_Block, ...]
    options: AttentionOptions
    whole: PartialAttention | None = (
        None  # of keys that all queries of a run see; blocks come after
    )


class _DividedAttention:
    """Of one rank."""

    def __init__(self, communicator: Communicator, is_native: bool) -> None:
        self._communicator = communicator
        self._is_native = is_native
        self._pages = PageShare(communicator.rank, communicator.num_ranks)

    def plan(
        self,
        rows: AttentionRows,
        kv_layer: KVLayer,
        num_heads: int,
        options: AttentionOptions = DEFAULT_OPTIONS,
        padded_tokens: int | None = None,
    ) -> object:
        """See `ops.PlanAttention`."""
        keys = [_own_keys(rows, self._pages, options, row) for row in range(rows.num_rows)]
        whole = None
        if self._is_native and takes(kv_layer):
            runs, keys = _whole_runs(rows, options, keys)
            if runs:
                whole = PartialAttention(runs, kv_layer, num_heads, options)
        return _Plan(tuple(_blocks(rows, options, keys)), options, whole)

    def attend(
        self, q: Tensor, kv_layer: KVLayer, plan: object, sink_logits: Tensor | None = None
    ) -> Tensor:
        """See `ops.PagedAttention`; -> [num_own, num_heads, head_dim]."""
        return self._attend(q, kv_layer, plan, q.shape[-1], sink_logits)

    def plan_latent(
        self,
        rows: AttentionRows,
        kv_layer: Tensor,
        num_heads: int,
        scale: float,
        padded_tokens: int | None = None,
    ) -> object:
        """See `ops.PlanLatentAttention`."""
        return self.plan(rows, kv_layer, num_heads, AttentionOptions(scale=scale))

    def attend_latent(
        self, q_latent: Tensor, q_rope: Tensor, kv_layer: Tensor, plan: object
    ) -> Tensor:
        """See `ops.LatentAttention`; -> [num_own, num_heads, latent_dim]."""
        q = torch.cat((q_latent, q_rope), dim=-1)
        return self._attend(q, kv_layer[None, None], plan, q_latent.shape[-1], None)

    def _attend(
        self,
        q: Tensor,
        kv_layer: KVLayer,
        plan: object,
        value_dim: int,
        sink_logits: Tensor | None,
    ) -> Tensor:
        assert isinstance(plan, _Plan), "the plan comes from this attention"
        num_tokens, num_heads, _ = q.shape
        wide = widen(q)
        # A token's sum of values, then the log of its sum of exponentials.
        parts = wide.new_zeros((num_tokens, num_heads, value_dim + 1))
        parts[..., value_dim] = -torch.inf
        if plan.whole is not None:
            parts[plan.whole.tokens] = plan.whole(q, kv_layer, value_dim)
        for block in plan.blocks:
            keys, values = _gather(kv_layer, block, wide.dtype)
            own = _attend(wide[block.tokens], keys, values[..., :value_dim], block, plan.options)
            if block.is_more or plan.whole is not None:
                own = _merged(torch.stack((parts[block.tokens], own)))
            parts[block.tokens] = own
        of_ranks = all_gather(self._communicator, parts)
        tokens = torch.from_numpy(TokenShare(num_tokens, self._communicator).places())
        together = _merged(of_ranks[:, tokens])
        out, lse = together[..., :-1], together[..., -1:]
        if sink_logits is not None:
            out = out * (lse - sink_logits.to(lse.dtype)[:, None]).sigmoid()
        return out.to(q.dtype).contiguous()


def _merged(parts: Tensor) -> Tensor:
    """parts [N, T, H, D + 1]: attention over N sets of keys, each with its log-sum-exp, -inf for no
    keys -> the same [T, H, D + 1] over all keys, added in the order of the sets."""
    out, lse = parts[..., :-1], parts[..., -1:]
    limits = torch.finfo(lse.dtype)
    largest = lse.amax(0).clamp_min_(limits.min)
    weights = (lse - largest).exp()
    total = out[0] * weights[0]
    for own, weight in zip(out[1:], weights[1:]):
        total += own * weight
    mass = weights.sum(0)
    return torch.cat((total / mass.clamp_min(limits.tiny), mass.log() + largest), dim=-1)


def _whole_runs(
    rows: AttentionRows, options: AttentionOptions, keys: Sequence[_Keys]
) -> tuple[list[Run], list[_Keys]]:
    """Each row's keys that all of its queries see, with its tokens; and the rest of the keys."""
    runs: list[Run] = []
    rest: list[_Keys] = []
    is_plain = options.window is None and options.chunk is None
    for row, (positions, slots) in enumerate(keys):
        start, end = (int(bound) for bound in rows.query_start[row : row + 2])
        num_whole = len(slots) if end - start == 1 else 0
        if is_plain:
            first_query = int(rows.seq_lens[row]) - (end - start)
            num_whole = int(np.searchsorted(positions, first_query, side="right"))
        if num_whole:
            runs.append(Run(start, end, slots[:num_whole]))
        rest.append((positions[num_whole:], slots[num_whole:]))
    return runs, rest


def _blocks(
    rows: AttentionRows, options: AttentionOptions, keys: Sequence[_Keys]
) -> Iterator[_Block]:
    lens = np.array([len(positions) for positions, _ in keys], dtype=np.int32)
    is_decode = (rows.num_queries == 1) & (lens > 0)
    for group in by_length(np.flatnonzero(is_decode).astype(np.int32), lens):
        yield _decode_block(rows, options, group, keys, lens[group])
    for row in np.flatnonzero((rows.num_queries > 1) & (lens > 0)).tolist():
        yield from _prefill_blocks(rows, options, row, *keys[row])


def _own_keys(rows: AttentionRows, pages: PageShare, options: AttentionOptions, row: int) -> _Keys:
    """Those that are here and that some query of the row sees."""
    first_query = int(rows.seq_lens[row] - rows.num_queries[row])
    positions = np.arange(int(rows.seq_lens[row]), dtype=np.int32)
    ids = rows.page_table[rows.table_rows[row]][positions // rows.page_size]
    is_read = pages.is_own(ids)
    if options.window is not None or options.chunk is not None:
        is_past = positions <= first_query  # what its first query does not see of it, no other does
        is_read &= ~(is_past & _is_hidden(np.array(first_query), positions, options))
    positions = positions[is_read]
    slots = pages.local(ids[is_read]) * rows.page_size + positions % rows.page_size
    return positions, slots


def _is_hidden(
    queries: IntArray, keys: IntArray, options: AttentionOptions
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Of positions that broadcast with each other."""
    is_hidden = keys > queries
    if options.window is not None:
        is_hidden |= (keys <= queries - options.window) & (keys >= options.num_sink_tokens)
    if options.chunk is not None:
        is_hidden |= keys // options.chunk != queries // options.chunk
    return is_hidden


def _decode_block(
    rows: AttentionRows,
    options: AttentionOptions,
    group: IntArray,
    keys: Sequence[_Keys],
    lens: IntArray,
) -> _Block:
    """The rows `group`, of one query each."""
    longest = int(lens.max())
    positions, slots = np.empty((2, len(group), longest), dtype=np.int32)
    for nth, row in enumerate(group.tolist()):
        for column, of_row in zip((positions, slots), keys[row]):
            column[nth, : len(of_row)] = of_row
            column[nth, len(of_row) :] = of_row[0]
    is_hidden = _is_hidden(rows.seq_lens[group, None] - 1, positions, options)
    is_hidden |= np.arange(longest) >= lens[:, None]
    tokens = rows.query_start[group].astype(np.int64)
    return _block(tokens, slots, is_hidden[:, None])


def _prefill_blocks(
    rows: AttentionRows,
    options: AttentionOptions,
    row: int,
    positions: IntArray,
    slots: IntArray,
) -> Iterator[_Block]:
    """One row's queries, each block over a run of the keys up to its last one."""
    start, end = (int(bound) for bound in rows.query_start[row : row + 2])
    shift = int(rows.seq_lens[row]) - end
    for first in range(start, end, _BLOCK_QUERIES):
        tokens = np.arange(first, min(first + _BLOCK_QUERIES, end), dtype=np.int64)
        queries = (tokens + shift).astype(np.int32)
        num_seen = int(np.searchsorted(positions, queries[-1], side="right"))
        is_more = False
        for key in range(0, num_seen, _BLOCK_KEYS):
            run = slice(key, min(key + _BLOCK_KEYS, num_seen))
            is_hidden = _is_hidden(queries[:, None], positions[run], options)
            if not is_hidden.all():
                yield replace(_block(tokens, slots[None, run], is_hidden[None]), is_more=is_more)
                is_more = True


def _block(
    tokens: np.ndarray[tuple[int], np.dtype[np.int64]],
    slots: IntArray,
    is_hidden: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> _Block:
    return _Block(
        tokens=torch.from_numpy(tokens),
        slots=torch.from_numpy(slots.astype(np.int64).ravel()),
        is_hidden=torch.from_numpy(is_hidden)[:, None],
        num_rows=len(slots),
    )


def _gather(kv_layer: KVLayer, block: _Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [R, KV, K, D] of a block; latents, one part, are both at once."""
    if isinstance(kv_layer, QuantizedKV):
        found = dequantized(kv_layer.values[:, :, block.slots], kv_layer.scales[:, :, block.slots])
    else:
        found = kv_layer.index_select(2, block.slots)
    num_parts, num_kv_heads, _, head_dim = found.shape
    found = found.to(dtype).view(num_parts, num_kv_heads, block.num_rows, -1, head_dim)
    keys, values = found[0], found[-1]
    return keys.transpose(0, 1), values.transpose(0, 1)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, block: _Block, options: AttentionOptions
) -> Tensor:
    """q [R * L, H, D], keys and values [R, KV, K, D] -> [R * L, H, value_dim + 1], as `_merged`
    takes them."""
    (num_queries, num_heads, head_dim), num_rows = q.shape, block.num_rows
    num_kv_heads, per_row = keys.shape[1], num_queries // num_rows
    scale = head_dim**-0.5 if options.scale is None else options.scale
    # [R, KV, L * G, D], the queries that share a KV head
    grouped = (q * scale).view(num_rows, per_row, num_kv_heads, -1, head_dim).transpose(1, 2)
    scores = grouped.flatten(2, 3) @ keys.transpose(2, 3)
    if options.soft_cap is not None:
        scores = scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
    by_query = scores.view(num_rows, num_kv_heads, per_row, -1, scores.shape[-1])
    by_query.masked_fill_(block.is_hidden[:, :, :, None], -torch.inf)
    largest = scores.amax(-1, keepdim=True).clamp_min_(torch.finfo(scores.dtype).min)
    weights = scores.sub_(largest).exp_()
    mass = weights.sum(-1, keepdim=True)
    out = weights @ values / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    parts = torch.cat((out, mass.log() + largest), dim=-1)
    parts = parts.view(num_rows, num_kv_heads, per_row, -1, parts.shape[-1]).transpose(1, 2)
    return parts.reshape(num_queries, num_heads, -1)
