"""Recurrent layers token by token: the ground truth. Behind drafts every state is kept.

Sources: short convolutions as in LFM2 (Liquid AI, 2025); the gated delta rule of Yang, Kautz and
Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, equation 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ops import Recurrence
from ..state_rows import StateRows
from .dense import silu, widen


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Rows, and what they have left: of each pool and slot the states behind one draft, two, ..."""

    rows: StateRows
    behind: list[tuple[Tensor, int, Sequence[Tensor]]] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """(first token, first draft, end, slot, begins) of each row."""
        rows, starts = self.rows, self.rows.query_start.tolist()
        drafts = (rows.query_start[1:] - rows.num_drafts).tolist()
        return zip(starts, drafts, starts[1:], rows.slots.tolist(), rows.is_first.tolist())


def plan_recurrence(rows: StateRows, padded_tokens: int | None = None) -> object:
    return RecurrencePlan(rows)


def accept_drafts(plan: object, accepted: Tensor) -> None:
    assert isinstance(plan, RecurrencePlan)
    numbers = dict(zip(plan.rows.slots.tolist(), accepted.tolist(), strict=True))
    for pool, slot, states in plan.behind:
        if n := numbers[slot]:
            pool[slot] = states[n - 1]


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
    for first, draft, last, slot, is_first in plan:
        tail = torch.zeros_like(tails[slot]) if is_first else tails[slot]
        inputs = torch.cat((tail, x[first:last]))
        windows = inputs.unfold(0, len(taps), 1)  # [tokens, channels, kernel]
        y[first:last] = (widen(windows) * taps.t()).sum(-1).to(x.dtype)
        ends = inputs.unfold(0, len(taps) - 1, 1).transpose(1, 2)  # behind 0 tokens, 1, ...
        tails[slot] = ends[draft - first]
        if draft < last:
            plan.behind.append((tails, slot, tuple(ends[draft - first + 1 :])))
    if bias is not None:
        y += bias
    return silu(widen(y)).to(y.dtype) if has_silu else y


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
    return _scan(queries, keys, v.to(rates), rates, log_decay.exp(), states, plan).to(v.dtype)


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
    return _scan(queries, keys, values, None, (steps * decay).exp(), states, plan).to(v.dtype)


def _scan(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rates: Tensor | None,
    decays: Tensor,
    states: Tensor,
    plan: object,
) -> Tensor:
    """Each token writes its value, or with `rates` [T, heads] what its key does not give yet, at
    that rate. All in the dtype of the states."""
    assert isinstance(plan, RecurrencePlan)
    out = torch.empty_like(values)
    for first, draft, last, slot, is_first in plan:
        state = torch.zeros_like(states[slot]) if is_first else states[slot].clone()
        behind: list[Tensor] = []
        for token in range(first, last):
            key, change = keys[token, :, :, None], values[token]  # [heads, key_dim, 1]
            state *= decays[token].view(len(state), -1, 1)  # [heads, key_dim or 1, 1]
            if rates is not None:
                change = (change - (state * key).sum(1)) * rates[token, :, None]
            state += key * change[:, None]
            out[token] = (state * queries[token, :, :, None]).sum(1)
            if token < draft:
                states[slot] = state
            else:
                behind.append(state.clone())
        plan.behind.append((states, slot, behind))
    return out


def for_heads(x: Tensor, num_heads: int) -> Tensor:
    """[T, num_groups, size] -> [T, num_heads, size], wide: each serves consecutive heads."""
    share = num_heads // x.shape[1]
    wide = widen(x)
    return wide.repeat_interleave(share, 1) if share > 1 else wide


def normed_heads(q: Tensor, k: Tensor, num_value_heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, num_value_heads, key_dim], wide, of unit length (queries also divided by
    sqrt(key_dim)): each serves consecutive value heads."""
    wide = (widen(x) for x in (q, k))
    unit = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in wide)
    queries, keys = (for_heads(x, num_value_heads) for x in unit)
    return queries * q.shape[-1] ** -0.5, keys


RECURRENCE = Recurrence(
    plan_recurrence, short_convolution, gated_delta_rule, state_space_scan, accept_drafts
)
