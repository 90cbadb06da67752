"""Experts that ranks share as wholes (expert parallelism): each rank computes, of the tokens of a
step, those that chose its experts.

Every rank has all tokens and routes them alike, so that nothing need be sent before; the sum over
the ranks that ends the block brings the results together. Where there are more ranks than groups of
experts, each expert is divided between the ranks of its group as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....errors import InvalidRequest
from ....kernels.ops import Experts
from ....kernels.reference.dense import widen
from ...checkpoint.config.model_config import ExpertsConfig, ModelConfig
from ...checkpoint.parts import Range
from .ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What a rank has of a mixture's experts."""

    experts: Range | None  # None: all
    ranks: Ranks  # between which each of them is divided

    def has(self, expert: int) -> bool:
        """Whether the expert is here, or a part of it."""
        return self.experts is None or self.experts[0] <= expert < self.experts[1]


def expert_share(num_experts: int, ranks: Ranks) -> ExpertShare:
    """This rank's share of the experts."""
    num_groups = ranks.num_expert_groups
    if num_groups == 1 or num_experts < num_groups:
        return ExpertShare(None, ranks)
    each = ranks.num_ranks // num_groups
    group, inner = divmod(ranks.rank, each)
    first, end = (num_experts * place // num_groups for place in (group, group + 1))
    within = ALONE if each == 1 else replace(ranks, rank=inner, num_ranks=each)
    return ExpertShare((first, end), within)


def is_divided(ranks: Ranks, experts: ExpertsConfig) -> bool:
    """Whether all parts of a mixture can be divided: their results are summed together."""
    within = expert_share(experts.num_experts, ranks).ranks
    fits = within.num_ranks == 1 or within.share(experts.intermediate_size) is not None
    shared = experts.shared_intermediate_size
    return experts.has_gates and fits and (not shared or ranks.share(shared) is not None)


def require_groups(config: ModelConfig, ranks: Ranks) -> None:
    """Raises InvalidRequest where groups of ranks would not have other experts each."""
    count, experts, name = ranks.num_expert_groups, config.experts, config.architecture
    if count == 1:
        return
    allowed = ""
    if experts is None:
        allowed = f"1: {name} has no experts to divide; tp_size divides the rest"
    elif count > experts.num_experts:
        allowed = f"an integer in [1, {experts.num_experts}], the experts that {name} has"
    elif config.varied is not None or not experts.has_gates:
        allowed = f"1: each rank computes all experts of {name}; tp_size divides the rest"
    elif not is_divided(ranks, experts):
        allowed = f"1: {ranks.num_ranks} ranks are too many to divide the experts of {name}"
    if allowed:
        raise InvalidRequest.of("ep_size", count, allowed)


class OwnExperts:
    """See `ops.Experts`; expert_ids of all experts, of which this rank has a range: its part of the
    sum over a token's choices."""

    def __init__(self, experts: Experts, own: Range, *, is_static: bool) -> None:
        """is_static: shapes may not depend on what tokens chose, as in a graph: what others have is
        computed too, by an expert that is here, and weighs nothing."""
        self._experts = experts
        self._first, self._end = own
        self._run = self._padded if is_static else self._picked

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """See `ops.Experts`."""
        is_own = (expert_ids >= self._first) & (expert_ids < self._end)
        return self._run(x, expert_ids - self._first, weights, is_own)

    def _picked(self, x: Tensor, ids: Tensor, weights: Tensor, is_own: Tensor) -> Tensor:
        tokens, choices = is_own.nonzero(as_tuple=True)
        total = torch.zeros_like(widen(x))
        if len(tokens):
            chosen = ids[tokens, choices][:, None]
            found = self._experts(x[tokens], chosen, torch.ones_like(chosen, dtype=weights.dtype))
            weighed = widen(found) * weights[tokens, choices][:, None].to(total.dtype)
            total.index_add_(0, tokens, weighed)
        return total.to(x.dtype)

    def _padded(self, x: Tensor, ids: Tensor, weights: Tensor, is_own: Tensor) -> Tensor:
        return self._experts(x, ids.masked_fill(~is_own, 0), weights.masked_fill(~is_own, 0.0))
