"""A mixture of experts on a CPU: pairs sorted by expert, one pair of products a chosen expert.

Experts that nobody chose are not looked at. Products are this backend's linears, packed at load
where it packs; the weighted sum over a token's experts is the reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import Activation, Experts, MakeLinear
from ..reference.dense import act_and_mul
from ..reference.experts import combine


def make_experts(
    gate_up: Tensor, down: Tensor, activation: Activation, make_linear: MakeLinear
) -> Experts:
    gate_up_linears = [make_linear(weight, None) for weight in gate_up]
    down_linears = [make_linear(weight, None) for weight in down]

    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        pairs = expert_ids.flatten()
        by_expert = pairs.argsort(stable=True)
        rows = x.index_select(0, by_expert // expert_ids.shape[1])
        start = 0
        for expert, count in enumerate(pairs.bincount(minlength=len(down)).tolist()):
            if count:
                own = rows[start : start + count]
                hidden = act_and_mul(gate_up_linears[expert](own), activation)
                own.copy_(down_linears[expert](hidden))
                start += count
        results = torch.empty_like(rows).index_copy_(0, by_expert, rows)
        return combine(results.view(*expert_ids.shape, x.shape[1]), weights)

    return experts
