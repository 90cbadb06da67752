"""A mixture of experts, one expert after the other over the tokens that chose it: the truth."""

from __future__ import annotations

from torch import Tensor

from ..ops import Activation, Experts, Weight
from ..quantized_weight import experts_of
from .dense import make_gated_linear, make_linear, widen


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
