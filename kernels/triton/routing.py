"""Chooses experts in one launch: a program a token, which holds all its experts in registers.

The experts form a tile [groups, experts of a group], padded with rank -inf. Each choice is one
maximum over the tile and one minimum over the places that have it, so that of equal ranks the lower
id wins, as in the reference. Cost: K + chosen groups reductions of at most some hundred numbers,
which is nothing beside a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model_options import RoutingOptions
from .language import tl, triton

_FAR = tl.constexpr(1 << 30)  # larger than every id
_TINY = tl.constexpr(1e-20)  # as the reference has it


def route_experts(
    logits: Tensor,
    selection_bias: Tensor | None,
    options: RoutingOptions,
    num_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    most_tokens, num_experts = logits.shape
    expert_ids = logits.new_empty((most_tokens, options.num_chosen), dtype=torch.int64)
    weights = logits.new_empty((most_tokens, options.num_chosen))
    group_size = num_experts // options.num_groups
    _route[(most_tokens,)](
        logits,
        logits if selection_bias is None else selection_bias,
        num_tokens,
        expert_ids,
        weights,
        options.weight_factor,
        NUM_EXPERTS=num_experts,
        GROUP_SIZE=group_size,
        NUM_GROUPS=options.num_groups,
        NUM_CHOSEN=options.num_chosen,
        NUM_CHOSEN_GROUPS=options.num_chosen_groups,
        IS_SOFTMAX=options.scoring == "softmax",
        HAS_BIAS=selection_bias is not None,
        IS_NORMALIZED=options.is_normalized,
        RANKS_BY_TWO=options.group_rank == "best_two",
        PADDED_GROUPS=triton.next_power_of_2(options.num_groups),
        PADDED_SIZE=triton.next_power_of_2(group_size),
        PADDED_CHOSEN=triton.next_power_of_2(options.num_chosen),
        num_warps=1 if num_experts <= 256 else 2,
    )
    return expert_ids, weights


@triton.jit
def _route(
    logits,
    selection_bias,
    num_tokens,
    expert_ids,
    weights,
    weight_factor,
    NUM_EXPERTS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    RANKS_BY_TWO: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    PADDED_CHOSEN: tl.constexpr,
):
    """One token. A NaN rank is the largest, as in the reference's sort: so the weights show it."""
    token = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, PADDED_GROUPS)
    places = tl.arange(0, PADDED_SIZE)
    ids = groups[:, None] * GROUP_SIZE + places[None, :]
    is_expert = (groups < NUM_GROUPS)[:, None] & (places < GROUP_SIZE)[None, :]
    logit = tl.load(logits + token * NUM_EXPERTS + ids, mask=is_expert, other=float("-inf"))
    if IS_SOFTMAX:
        scores = tl.exp(logit - _largest(logit))
        scores = scores / _total(scores)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    ranks = scores
    if HAS_BIAS:
        ranks += tl.load(selection_bias + ids, mask=is_expert, other=0.0)
    ranks = tl.where(ranks == ranks, ranks, float("inf"))
    ranks = tl.where(is_expert, ranks, float("-inf"))
    if NUM_CHOSEN_GROUPS < NUM_GROUPS:
        group_ranks = tl.max(ranks, 1)
        if RANKS_BY_TWO:
            is_best = ranks == group_ranks[:, None]
            best = tl.min(tl.where(is_best, ids, _FAR), 1)
            others = tl.where(ids == best[:, None], float("-inf"), ranks)
            group_ranks += tl.max(others, 1)
        is_chosen = tl.zeros([PADDED_GROUPS], tl.int32)
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            open_ranks = tl.where(is_chosen != 0, float("-inf"), group_ranks)
            is_largest = (open_ranks == tl.max(open_ranks, 0)) & (is_chosen == 0)
            group = tl.min(tl.where(is_largest, groups, _FAR), 0)
            is_chosen = tl.where(groups == group, 1, is_chosen)
        ranks = tl.where((is_chosen != 0)[:, None], ranks, float("-inf"))

    k = tl.arange(0, PADDED_CHOSEN)
    chosen_ids = tl.zeros([PADDED_CHOSEN], tl.int64)
    chosen = tl.zeros([PADDED_CHOSEN], logit.dtype)
    for index in tl.static_range(NUM_CHOSEN):
        found = tl.min(tl.min(tl.where(ranks == _largest(ranks), ids, _FAR), 1), 0)
        expert = tl.where(found < NUM_EXPERTS, found, 0)
        score = _total(tl.where(ids == expert, scores, 0.0))
        chosen_ids = tl.where(k == index, expert.to(tl.int64), chosen_ids)
        chosen = tl.where(k == index, score, chosen)
        ranks = tl.where(ids == expert, float("-inf"), ranks)
    if IS_NORMALIZED:
        chosen = chosen / (tl.sum(chosen, 0) + _TINY)
    if num_tokens is not None:
        is_token = token < tl.load(num_tokens)
        chosen_ids = tl.where(is_token, chosen_ids, -1)
        chosen = tl.where(is_token, chosen, 0.0)
    at = token * NUM_CHOSEN + k
    tl.store(expert_ids + at, chosen_ids, mask=k < NUM_CHOSEN)
    tl.store(weights + at, chosen * weight_factor, mask=k < NUM_CHOSEN)


@triton.jit
def _largest(tile):
    return tl.max(tl.max(tile, 1), 0)


@triton.jit
def _total(tile):
    return tl.sum(tl.sum(tile, 1), 0)
