"""A mixture of experts on a CPU: one pair of products for each chosen expert, over the tokens that
chose it.

Experts without tokens are skipped. Products are this backend's linears, packed at load if it packs;
the weighted sum over a token's experts is the reference's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_options import ClampedSwiGLU
from ..ops import Activation, Experts, MakeGatedLinear, MakeLinear, Weight
from ..reference.experts import combine, gated_linears_of, linears_of


def make_experts(
    gate_up: Weight,
    down: Weight,
    activation: Activation | ClampedSwiGLU,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    make_linear: MakeLinear,
    make_gated_linear: MakeGatedLinear,
) -> Experts:
    gated_linears = gated_linears_of(
        gate_up, gate_up_bias, activation, make_linear, make_gated_linear
    )
    down_linears = linears_of(down, down_bias, make_linear)

    def of_one_token(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        chosen = expert_ids[0].tolist()
        results = [down_linears[expert](gated_linears[expert](x)) for expert in chosen]
        return combine(torch.cat(results)[None], weights)

    def experts(x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if len(x) == 1:
            return of_one_token(x, expert_ids, weights)
        pairs = expert_ids.flatten()
        by_expert = pairs.argsort(stable=True)
        rows = x.index_select(0, by_expert // expert_ids.shape[1])
        start = 0
        for expert, count in enumerate(pairs.bincount().tolist()):
            if count:
                own = rows[start : start + count]
                own.copy_(down_linears[expert](gated_linears[expert](own)))
                start += count
        results = torch.empty_like(rows).index_copy_(0, by_expert, rows)
        return combine(results.view(*expert_ids.shape, x.shape[1]), weights)

    return experts
