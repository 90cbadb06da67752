"""A mixture of experts, one expert after the other over the tokens that chose it: the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_options import RoutingOptions
from ..ops import Activation, Experts, Weight
from ..quantized_tensors import experts_of
from .dense import make_gated_linear, make_linear, sigmoid, widen


def make_experts(gate_up: Weight, down: Weight, activation: Activation) -> Experts:
    gated_linears = [make_gated_linear(weight, None, activation) for weight in experts_of(gate_up)]
    down_linears = [make_linear(weight, None) for weight in experts_of(down)]

    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        results = x.new_empty(*expert_ids.shape, x.shape[1])
        for expert, (gated_linear, down_linear) in enumerate(zip(gated_linears, down_linears)):
            chosen = expert_ids == expert
            results[chosen] = down_linear(gated_linear(x[chosen.nonzero()[:, 0]]))
        return combine(results, weights)

    return experts


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """results [T, K, H], weights [T, K] -> their weighted sum over K, [T, H]."""
    wide = widen(results)
    return (wide * weights[..., None].to(wide.dtype)).sum(1).to(results.dtype)


# Added to the sum of the weights when they are normalized, as in DeepSeek-V3.
_TINY = 1e-20


def route_experts(
    logits: Tensor, selection_bias: Tensor | None, options: RoutingOptions
) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if options.scoring == "softmax" else sigmoid(logits)
    ranks = scores if selection_bias is None else scores + selection_bias
    if options.num_chosen_groups < options.num_groups:
        ranks = _within_chosen_groups(ranks, options)
    expert_ids = _best(ranks, options.num_chosen)
    weights = scores.gather(1, expert_ids)
    if options.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return expert_ids, weights * options.weight_factor


def _within_chosen_groups(ranks: Tensor, options: RoutingOptions) -> Tensor:
    """-inf for the experts of groups that were not chosen."""
    groups = ranks.view(len(ranks), options.num_groups, -1)
    num_best = 1 if options.group_rank == "best" else 2
    group_ranks = groups.topk(num_best).values.sum(-1)
    is_chosen = torch.zeros_like(group_ranks, dtype=torch.bool)
    is_chosen.scatter_(1, _best(group_ranks, options.num_chosen_groups), True)
    return groups.masked_fill(~is_chosen[..., None], -torch.inf).view(ranks.shape)


def _best(ranks: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of each row, largest first; of equals the first."""
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count]
