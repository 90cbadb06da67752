"""Recurrent layers in few torch calls: rows of one token together, longer ones in chunks.

Source of the gated delta rule's chunked form: Yang et al., "Parallelizing linear transformers with
the delta rule over sequence length", NeurIPS 2024 (the WY representation), with the decay of "Gated
Delta Networks" (2024), section 3.3. Within a chunk of C tokens what the tokens write depends on
each other through a triangular system, solved once for all; between chunks only the state is
passed on.

Cost: of a chunk O(C^2 d) beside the O(C d^2) of token by token, as matrix products; C = 64 as in
the authors' kernels. Mamba-2's scan has the same form without the system (Dao and Gu, 2024,
section 6).

Drafts are a chunk by themselves, whose tokens' keys and writes are kept: once it is known how many
of them were right, their part of the chunk is added to the state (`accept_drafts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Recurrence
from ..reference.dense import widen
from ..reference.recurrence import for_heads, normed_heads
from ..state_rows import StateRows

CHUNK_TOKENS = 64
# With a decay for each number of a key (Kimi Linear, 2025) products between tokens are sums over
# these, and not matrix products: shorter chunks have fewer of them. A guess.
_CHANNEL_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Rows of one token, and the others one by one: (first token, end, slot, begins); behind both,
    what rows have of drafts: (first draft, end, slot)."""

    is_all_single: bool
    single_tokens: Tensor  # [N] int64, on the token axis
    single_slots: tuple[int, ...]  # N
    single_firsts: Tensor | None  # [N] bool; None: none begins
    long: tuple[tuple[int, int, int, bool], ...]
    drafted: tuple[tuple[int, int, int], ...]
    slots: tuple[int, ...]  # of all rows, in their order
    tails: list[DraftedTail] = field(default_factory=list)  # what the rows with drafts have left
    writes: list[DraftedWrites] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftedTail:
    """Of a convolution and a row with n drafts."""

    pool: Tensor
    slot: int
    inputs: Tensor  # [kernel - 1 + n, channels]: the tail before the drafts, and they


@dataclass(frozen=True, slots=True)
class DraftedWrites:
    """Of a scan and a row with n drafts."""

    pool: Tensor
    slot: int
    decay: Tensor  # [heads, n, key_dim or 1] logarithms, summed up
    keys: Tensor  # [heads, n, key_dim]
    written: Tensor  # [heads, n, value_dim]


def plan_recurrence(rows: StateRows, padded_tokens: int | None = None) -> object:
    starts, ends = rows.query_start[:-1], rows.query_start[1:]
    known = ends - rows.num_drafts
    is_single, has_drafts = known - starts == 1, rows.num_drafts > 0
    firsts = rows.is_first[is_single]
    columns = (starts, known, rows.slots, rows.is_first)
    drafts = (known, ends, rows.slots)
    return RecurrencePlan(
        bool((ends - starts == 1).all()),
        torch.from_numpy(starts[is_single].copy()),
        tuple(rows.slots[is_single].tolist()),
        torch.from_numpy(firsts.copy()) if firsts.any() else None,
        tuple(zip(*(column[~is_single].tolist() for column in columns))),
        tuple(zip(*(column[has_drafts].tolist() for column in drafts))),
        tuple(rows.slots.tolist()),
    )


def accept_drafts(plan: object, accepted: Tensor) -> None:
    assert isinstance(plan, RecurrencePlan)
    numbers = dict(zip(plan.slots, accepted.tolist(), strict=True))
    for tail in plan.tails:
        if n := numbers[tail.slot]:
            tail.pool[tail.slot] = tail.inputs[n : n + tail.pool.shape[1]]
    for kept in plan.writes:
        if n := numbers[kept.slot]:
            until_end = (kept.decay[:, n - 1 : n] - kept.decay[:, :n]).exp_()
            state = kept.pool[kept.slot].mul_(kept.decay[:, n - 1, :, None].exp())
            state.baddbmm_((kept.keys[:, :n] * until_end).transpose(-1, -2), kept.written[:, :n])


def short_convolution(
    x: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    tails: Tensor,
    plan: object,
    *,
    has_silu: bool = False,
) -> Tensor:
    assert isinstance(plan, RecurrencePlan)
    y = torch.empty_like(x)
    if len(plan.single_tokens):
        at = slice(None) if plan.is_all_single else plan.single_tokens
        window = torch.cat((_taken(tails, plan), x[at, None]), 1)  # [N, kernel, channels]
        _put(tails, plan, window[:, 1:])
        y[at] = (window * taps).sum(1).to(x.dtype)
    for first, last, slot, is_first in plan.long:
        tail = torch.zeros_like(tails[slot]) if is_first else tails[slot]
        inputs = torch.cat((tail, x[first:last]))
        y[first:last] = _convolved(inputs, taps)
        tails[slot] = inputs[last - first :]
    for first, last, slot in plan.drafted:
        inputs = torch.cat((tails[slot], x[first:last]))
        y[first:last] = _convolved(inputs, taps)
        plan.tails.append(DraftedTail(tails, slot, inputs))
    if bias is not None:
        y += bias
    return F.silu(y, inplace=True) if has_silu else y


def _convolved(inputs: Tensor, taps: Tensor) -> Tensor:
    """[kernel - 1 + n, channels], taps [kernel, channels] -> [n, channels], wide."""
    wide, num_tokens = widen(inputs), len(inputs) - len(taps) + 1
    total = wide[:num_tokens] * taps[0]
    for age in range(1, len(taps)):
        total.addcmul_(wide[age : age + num_tokens], taps[age])
    return total


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    plan: object,
) -> Tensor:
    queries, keys = normed_heads(q, k, v.shape[1])
    rates = beta.to(states.dtype)
    return _scan(queries, keys, v.to(rates), rates, log_decay, states, plan).to(v.dtype)


def state_space_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Tensor,
    decay: Tensor,
    states: Tensor,
    plan: object,
) -> Tensor:
    queries, keys = (for_heads(x, v.shape[1]) for x in (q, k))
    values = v.to(states.dtype) * steps[..., None]
    return _scan(queries, keys, values, None, steps * decay, states, plan).to(v.dtype)


def _scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rates: Tensor | None,
    log_decay: Tensor,
    states: Tensor,
    plan: object,
) -> Tensor:
    """Each token writes its value, or with `rates` [T, heads] what its key does not give yet, at
    that rate. All in the dtype of the states."""
    assert isinstance(plan, RecurrencePlan)
    out = torch.empty_like(values)
    if len(plan.single_tokens):
        at = slice(None) if plan.is_all_single else plan.single_tokens
        decay = log_decay[at].exp()
        state = _taken(states, plan).mul_(decay.view(*decay.shape[:2], -1, 1))
        key, change = keys[at].unsqueeze(-1), values[at].unsqueeze(-2)  # [N, heads, key_dim, 1]
        if rates is not None:
            change = (change - key.transpose(-1, -2) @ state) * rates[at][..., None, None]
        state.addcmul_(key, change)
        _put(states, plan, state)
        out[at] = (queries[at].unsqueeze(-2) @ state).squeeze(-2)
    for first, last, slot, is_first in plan.long:
        state = torch.zeros_like(states[slot]) if is_first else states[slot]
        for at in _chunks(first, last, log_decay.dim() == 3):
            chunk = _Chunk.of(log_decay[at].transpose(0, 1))
            key, written = _compute(chunk, at, queries, keys, values, rates, state, out)
            state = chunk.write(key, written, state)
        states[slot] = state
    for first, last, slot in plan.drafted:
        at, state = slice(first, last), states[slot]
        chunk = _Chunk.of(log_decay[at].transpose(0, 1))
        key, written = _compute(chunk, at, queries, keys, values, rates, state, out)
        kept = (each.clone() for each in (chunk.decay, key, written))  # not all of the step's
        plan.writes.append(DraftedWrites(states, slot, *kept))
    return out


def _compute(
    chunk: _Chunk,
    at: slice,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rates: Tensor | None,
    state: Tensor,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk, into `out`; its keys and what it writes, [heads, C, ...]."""
    query, key, written = (x[at].transpose(0, 1) for x in (queries, keys, values))
    if rates is not None:
        written = chunk.written(key, written, rates[at].t(), state)
    out[at] = chunk.read(query, key, written, state).transpose(0, 1)
    return key, written


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The decays within a chunk of C tokens; K: key_dim, or 1 where a token has one of them."""

    decay: Tensor  # [heads, C, K] logarithms, summed up
    between: Tensor  # [heads, C, C, K] from each token to each later one; 0 to those before
    since: Tensor  # [heads, C, K] since the chunk's begin
    until_end: Tensor  # [heads, C, K]

    @classmethod
    def of(cls, log_decay: Tensor) -> _Chunk:
        """log_decay [heads, C] or [heads, C, key_dim]"""
        decay = log_decay.view(*log_decay.shape[:2], -1).cumsum(1)
        above = torch.ones(decay.shape[1], decay.shape[1], dtype=torch.bool).triu_(1)
        between = decay[:, :, None] - decay[:, None]
        return cls(
            decay,
            between.masked_fill_(above[..., None], float("-inf")).exp_(),
            decay.exp(),
            (decay[:, -1:] - decay).exp(),
        )

    def products(self, later: Tensor, earlier: Tensor) -> Tensor:
        """[heads, C, key_dim] both -> [heads, C, C], decayed between the two."""
        if self.between.shape[-1] == 1:
            return later @ earlier.transpose(-1, -2) * self.between[..., 0]
        return (later[:, :, None] * earlier[:, None] * self.between).sum(-1)

    def written(self, k: Tensor, v: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        """What each token of the delta rule writes: its value, less what those before it have
        written for its key."""
        system = self.products(k * beta[..., None], k)
        wanted = (v - (k * self.since) @ state) * beta[..., None]
        written: Tensor = torch.linalg.solve_triangular(
            system, wanted, upper=False, unitriangular=True
        )
        return written

    def read(self, q: Tensor, k: Tensor, written: Tensor, state: Tensor) -> Tensor:
        """[heads, C, value_dim]"""
        return (q * self.since) @ state + self.products(q, k) @ written

    def write(self, k: Tensor, written: Tensor, state: Tensor) -> Tensor:
        """The state behind the chunk."""
        return state * self.since[:, -1, :, None] + (k * self.until_end).transpose(-1, -2) @ written


def _chunks(first: int, last: int, has_channels: bool) -> list[slice]:
    size = _CHANNEL_CHUNK_TOKENS if has_channels else CHUNK_TOKENS
    return [slice(start, min(start + size, last)) for start in range(first, last, size)]


def _taken(pool: Tensor, plan: RecurrencePlan) -> Tensor:
    """The states of the rows of one token, zeros for those that begin: a copy, or, of a single row,
    the state itself."""
    slots = plan.single_slots
    if len(slots) == 1:
        taken = pool[slots[0] : slots[0] + 1]
    else:
        taken = torch.stack([pool[slot] for slot in slots])
    if plan.single_firsts is not None:
        taken[plan.single_firsts] = 0
    return taken


def _put(pool: Tensor, plan: RecurrencePlan, states: Tensor) -> None:
    """Row by row: torch's `index_copy_` takes three times as long."""
    for slot, state in zip(plan.single_slots, states):
        if pool[slot].data_ptr() != state.data_ptr():
            pool[slot] = state


RECURRENCE = Recurrence(
    plan_recurrence, short_convolution, gated_delta_rule, state_space_scan, accept_drafts
)
