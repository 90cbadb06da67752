"""A mixture of experts, one expert after the other over the tokens that chose it: the truth."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..model_options import ClampedSwiGLU, RoutingOptions
from ..ops import Activation, Experts, Linear, MakeGatedLinear, MakeLinear, Weight
from ..quantized_tensors import experts_of
from .dense import make_gated_linear, make_linear, sigmoid, widen


def make_experts(
    gate_up: Weight,
    down: Weight,
    activation: Activation | ClampedSwiGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Experts:
    gated_linears = gated_linears_of(
        gate_up, gate_up_bias, activation, make_linear, make_gated_linear
    )
    down_linears = linears_of(down, down_bias, make_linear)

    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        results = x.new_zeros(*expert_ids.shape, x.shape[1])
        for expert, (gated_linear, down_linear) in enumerate(zip(gated_linears, down_linears)):
            chosen = expert_ids == expert
            results[chosen] = down_linear(gated_linear(x[chosen.nonzero()[:, 0]]))
        return combine(results, weights)

    return experts


def linears_of(stack: Weight, biases: Tensor | None, make_linear: MakeLinear) -> list[Linear]:
    """A linear for each expert."""
    weights = list(experts_of(stack))
    own = [None] * len(weights) if biases is None else biases
    return [make_linear(weight, bias) for weight, bias in zip(weights, own, strict=True)]


def gated_linears_of(
    stack: Weight,
    biases: Tensor | None,
    activation: Activation | ClampedSwiGLU,
    make_linear: MakeLinear,
    make_gated_linear: MakeGatedLinear,
) -> list[Linear]:
    """A gated linear for each expert."""
    if not isinstance(activation, ClampedSwiGLU):
        gated = partial(_gated, make_gated_linear, activation)
    else:
        gated = partial(_clamped, make_linear, activation)
    return linears_of(stack, biases, gated)


def _gated(
    make_gated_linear: MakeGatedLinear, activation: Activation, weight: Weight, bias: Tensor | None
) -> Linear:
    return make_gated_linear(weight, bias, activation)


def _clamped(
    make_linear: MakeLinear, activation: ClampedSwiGLU, weight: Weight, bias: Tensor | None
) -> Linear:
    linear = make_linear(weight, bias)
    return lambda x: clamped_swiglu(linear(x), activation)


def clamped_swiglu(gate_up: Tensor, activation: ClampedSwiGLU) -> Tensor:
    """gate_up [T, 2 * size], gates first -> [T, size]."""
    gate, up = widen(gate_up).chunk(2, dim=-1)
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    return (gate * sigmoid(gate * activation.alpha) * (up + 1)).to(gate_up.dtype)


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """results [T, K, H], weights [T, K] -> their weighted sum over K, [T, H]."""
    wide = widen(results)
    return (wide * weights[..., None].to(wide.dtype)).sum(1).to(results.dtype)


# Added to the sum of the weights when they are normalized, as in DeepSeek-V3.
_TINY = 1e-20


def route_experts(
    logits: Tensor,
    selection_bias: Tensor | None,
    options: RoutingOptions,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1) if options.scoring == "softmax" else sigmoid(logits)
    ranks = scores if selection_bias is None else scores + selection_bias
    if options.num_chosen_groups < options.num_groups:
        ranks = _within_chosen_groups(ranks, options)
    expert_ids = _best(ranks, options.num_chosen)
    weights = scores.gather(1, expert_ids)
    if options.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    weights = weights * options.weight_factor
    if num_tokens is None:
        return expert_ids, weights
    is_padding = (torch.arange(len(logits), device=logits.device) >= num_tokens)[:, None]
    return expert_ids.masked_fill(is_padding, -1), weights.masked_fill(is_padding, 0.0)


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
