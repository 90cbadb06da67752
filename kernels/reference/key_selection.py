"""Selection of keys by an index, one query after the other, in plain torch: the truth.

A score is one sum of products, so that a query's scores have the same bits in any step. Cost as
that of a matrix product, without its speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention_rows import AttentionRows
from .dense import widen


@dataclass(frozen=True, slots=True)
class SelectionPlan:
    rows: AttentionRows
    num_selected: int


def plan_selection(rows: AttentionRows, num_selected: int) -> SelectionPlan:
    return SelectionPlan(rows, num_selected)


def select_keys(q: Tensor, weights: Tensor, index_keys: Tensor, plan: object) -> Tensor:
    assert isinstance(plan, SelectionPlan), "the plan comes from this backend"
    rows = plan.rows
    selected = torch.empty((len(q), plan.num_selected), dtype=torch.int32, device=q.device)
    for row in range(rows.num_rows):
        slots = torch.from_numpy(rows.slots(row, 0, int(rows.seq_lens[row]))).to(q.device)
        keys = widen(index_keys.index_select(0, slots))
        end = int(rows.query_start[row + 1])
        for token in range(int(rows.query_start[row]), end):
            seen = keys[: len(keys) - (end - 1 - token)]
            scores = _scores(widen(q[token]), weights[token], seen)
            selected[token] = slots[_best(scores, plan.num_selected)]
    return selected


def _scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q [H, D], weights [H], keys [S, D] -> [S]"""
    total = torch.zeros(len(keys), dtype=q.dtype, device=q.device)
    for head, weight in zip(q, weights, strict=True):
        total += (keys * head).sum(-1).relu() * weight
    return total


def _best(scores: Tensor, count: int) -> Tensor:
    """[count] ascending places of the highest scores."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values
