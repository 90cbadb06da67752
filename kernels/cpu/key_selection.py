"""Selection of keys by an index in torch calls: all heads of a block of a row's queries are the
rows of one product over its keys, which are gathered once.

The highest scores of a query are found by the lowest of them, which `topk` gives in time linear in
the keys; a running count of those equal to it decides which of them are in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from ..reference.dense import widen

# Scores of a product's block, queries by heads by keys: 16 MiB of float32 (a guess).
_BLOCK_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class RowKeys:
    """A row's place among the queries, and the slots of its keys."""

    tokens: slice
    slots: Tensor  # [num_keys] int32


@dataclass(frozen=True, slots=True)
class CpuSelectionPlan:
    rows: tuple[RowKeys, ...]
    num_selected: int


def plan_selection(rows: AttentionRows, num_selected: int) -> CpuSelectionPlan:
    starts = rows.query_start.tolist()
    planned = [
        RowKeys(slice(starts[row], starts[row + 1]), torch.from_numpy(rows.slots(row, 0, length)))
        for row, length in enumerate(rows.seq_lens.tolist())
    ]
    return CpuSelectionPlan(tuple(planned), num_selected)


def select_keys(q: Tensor, weights: Tensor, index_keys: Tensor, plan: object) -> Tensor:
    assert isinstance(plan, CpuSelectionPlan), "the plan comes from this backend"
    selected = torch.empty((len(q), plan.num_selected), dtype=torch.int32, device=q.device)
    for row in plan.rows:
        keys = widen(index_keys.index_select(0, row.slots))
        _select(q[row.tokens], weights[row.tokens], keys, row.slots, selected[row.tokens])
    return selected


def _select(q: Tensor, weights: Tensor, keys: Tensor, slots: Tensor, out: Tensor) -> None:
    """q [L, H, D] at the last L of the S positions of keys [S, D]; fills out [L, num_selected]."""
    num_queries, num_before = len(q), len(keys) - len(q)
    block = max(1, _BLOCK_SCORES // (q.shape[1] * len(keys)))
    for first in range(0, num_queries, block):
        last = min(first + block, num_queries)
        seen = keys[: num_before + last]
        scores = _scores(widen(q[first:last]), weights[first:last], seen)
        own = scores[:, num_before + first :]
        own.masked_fill_(torch.ones_like(own, dtype=torch.bool).triu_(1), -torch.inf)
        out[first:last] = slots[_best(scores, out.shape[1])]


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [L, H, D], weights [L, H], keys [S, D] -> [L, S], finite."""
    products = torch.mm(q.flatten(0, 1), keys.T).relu_().view(*weights.shape, len(keys))
    scores = torch.bmm(weights[:, None], products)[:, 0]
    lowest = torch.finfo(scores.dtype).min
    return scores.nan_to_num_(nan=lowest)


def _best(scores: Tensor, count: int) -> Tensor:
    """scores [L, S], finite or -inf, with `count` finite ones each -> [L, count] ascending places
    of the highest."""
    least = scores.topk(count, sorted=False).values.amin(-1, keepdim=True)
    is_above, is_equal = scores > least, scores == least
    num_wanted = count - is_above.sum(-1, keepdim=True)
    is_in = is_above | (is_equal & (is_equal.cumsum(-1) <= num_wanted))
    # Each to the column of its rank, the others to one column more: that waits for no device.
    column = is_in.cumsum(-1).sub_(1).masked_fill_(~is_in, count)
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(column)
    best = places.new_empty(len(scores), count + 1).scatter_(1, column, places)
    return best[:, :count]
