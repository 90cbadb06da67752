"""A mixture of experts, one expert after the other over the tokens that chose it: the truth."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..ops import Activation, Experts
from .dense import act_and_mul, widen


def make_experts(gate_up: Tensor, down: Tensor, activation: Activation) -> Experts:
    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        results = x.new_empty(*expert_ids.shape, x.shape[1])
        for expert in range(len(gate_up)):
            chosen = expert_ids == expert
            hidden = act_and_mul(F.linear(x[chosen.nonzero()[:, 0]], gate_up[expert]), activation)
            results[chosen] = F.linear(hidden, down[expert])
        return combine(results, weights)

    return experts


def combine(results: Tensor, weights: Tensor) -> Tensor:
    """results [T, K, H], weights [T, K] -> their weighted sum over K, [T, H]."""
    wide = widen(results)
    return (wide * weights[..., None].to(wide.dtype)).sum(1).to(results.dtype)
