"""Experts that ranks share as wholes (expert parallelism): each rank computes, of the tokens of a
step, those that chose its experts. Of an expert with copies in several groups a token takes the one
that its id and position say: so what it gets does not depend on other tokens.

Every rank has all tokens and routes them alike, so that nothing need be sent before; the sum over
the ranks that ends the block brings the results together. Where there are more ranks than groups of
experts, each expert is divided between the ranks of its group as well. Where ranks divide tokens,
groups are of those, and tokens are sent (`expert_dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....errors import InvalidRequest
from ....kernels.ops import Experts
from ....kernels.reference.dense import widen
from ...checkpoint.config.model_config import ExpertsConfig, ModelConfig
from ..forward_batch import ForwardBatch
from .expert_placement import places_of
from .ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What a rank has of a mixture's experts."""

    experts: Sequence[int] | None  # ascending; None: all
    ranks: Ranks  # between which each of them is divided
    # [turns, experts]: of each expert its slot among this rank's where a token with this turn is
    # computed here, else -1; where ranks divide tokens, as `SentExperts` takes it. Of all: none.
    slots: Sequence[Sequence[int]] = ()

    def has(self, expert: int) -> bool:
        """Whether the expert is here, or a part of it."""
        return self.experts is None or expert in self.experts


def expert_share(layer: int, num_experts: int, ranks: Ranks) -> ExpertShare:
    """This rank's share of the experts of the model's layer with this index."""
    groups = ranks.expert_groups
    if groups.count == 1:
        return ExpertShare(None, ranks)
    placement = groups.placement(layer, num_experts)
    among = ranks if ranks.context is None else ranks.context
    each = among.num_ranks // groups.count
    group, place = divmod(among.rank, each)

    def code(holder: int, slot: int) -> int:
        if ranks.context is not None:  # of the ranks of a group, all alike, one for each sender
            return (holder * each + place) * num_experts + slot
        return slot if holder == group else -1

    slots = [[code(*place_of) for place_of in turn] for turn in places_of(placement)]
    return ExpertShare(placement[group], _within_group(ranks), slots)


def _within_group(ranks: Ranks) -> Ranks:
    """This rank among those between which each expert is divided."""
    if ranks.context is not None:
        return ranks
    each = ranks.num_ranks // ranks.expert_groups.count
    return replace(ranks, rank=ranks.rank % each, num_ranks=each)


def ranks_of(experts: ExpertsConfig, ranks: Ranks) -> Ranks:
    """Those between which a mixture is divided; `ALONE` where each computes all of it."""
    if not experts.has_gates:
        return ALONE
    if _fits(experts, ranks):
        return ranks
    if ranks.context is None:
        return ALONE
    return replace(ALONE, context=ranks.context, expert_groups=ranks.expert_groups)


def _fits(experts: ExpertsConfig, ranks: Ranks) -> bool:
    """Whether all parts can be divided between these: their results are summed together."""
    within, shared = _within_group(ranks), experts.shared_intermediate_size
    fits = within.num_ranks == 1 or within.share(experts.intermediate_size) is not None
    return fits and (not shared or ranks.num_ranks == 1 or ranks.share(shared) is not None)


def require_groups(config: ModelConfig, ranks: Ranks, *, are_of_context: bool = False) -> None:
    """Raises InvalidRequest where groups of ranks would not have other experts each.
    are_of_context: the groups, see `Ranks`."""
    groups, experts, name = ranks.expert_groups, config.experts, config.architecture
    count = groups.count
    if count == 1:
        return
    allowed = ""
    if experts is None:
        allowed = f"1: {name} has no experts to divide; tp_size divides the rest"
    elif count > experts.num_experts:
        allowed = f"an integer in [1, {experts.num_experts}], the experts that {name} has"
    elif config.varied is not None or not experts.has_gates:
        allowed = f"1: each rank computes all experts of {name}; tp_size divides the rest"
    elif not are_of_context and not _fits(experts, ranks):
        allowed = f"1: {ranks.num_ranks} ranks are too many to divide the experts of {name}"
    if allowed:
        raise InvalidRequest.of("ep_size", count, allowed)
    assert experts is not None
    most = experts.num_experts - -(-experts.num_experts // count)
    if groups.num_extra > most:
        allowed = f"an integer in [0, {most}]: then each group has all experts of {name}"
        raise InvalidRequest.of("ep_extra_experts", groups.num_extra, allowed)


class ExpertSlots:
    """Where what tokens choose is computed: `ExpertShare.slots` by their turns."""

    def __init__(self, share: ExpertShare, device: torch.device) -> None:
        """share: of which `experts` are not all."""
        table = torch.tensor(share.slots, device=device)
        self._num_turns, self._num_experts = table.shape
        self._table = table.flatten()

    def __call__(self, expert_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, K] of a rank's tokens -> [T, K]; -1 stays."""
        if batch.num_tokens is None:
            return self._slots_of(expert_ids, batch)
        return self._slots_of(expert_ids.clamp(min=0), batch).masked_fill(expert_ids < 0, -1)

    def _slots_of(self, expert_ids: Tensor, batch: ForwardBatch) -> Tensor:
        if self._num_turns == 1:
            return self._table[expert_ids]
        positions = batch.positions
        places = batch.tokens.take(positions if positions.dim() == 1 else positions.sum(0))
        turns = (batch.input_ids + places) % self._num_turns
        return self._table[expert_ids + turns[:, None] * self._num_experts]


class OwnExperts:
    """See `ops.Experts`; expert_ids as slots of this rank, -1 for others: its part of the sum over
    a token's choices. It picks them out for kernels that would go through all tokens: a CPU's."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """See `ops.Experts`."""
        tokens, choices = (expert_ids >= 0).nonzero(as_tuple=True)
        total = torch.zeros_like(widen(x))
        if len(tokens):
            chosen = expert_ids[tokens, choices][:, None]
            found = self._experts(x[tokens], chosen, torch.ones_like(chosen, dtype=weights.dtype))
            weighed = widen(found) * weights[tokens, choices][:, None].to(total.dtype)
            total.index_add_(0, tokens, weighed)
        return total.to(x.dtype)
