"""Tokens sent to the ranks that have their experts, where ranks divide a step's tokens (expert
parallelism beside context parallelism; Lepikhin et al. 2020, "GShard", section 3.2).

    dispatch   to each rank those tokens that chose any of its experts, once each
    experts    a rank's own, for whoever's tokens came
    combine    each rank's part of a token's sum comes back; parts are added in the order of ranks

Two exchanges a layer, whose sizes follow from what tokens chose. What a token gets depends neither
on other tokens nor on the rank that has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....kernels.ops import Communicator, Experts
from ....kernels.reference.dense import widen


class SentExperts:
    """See `ops.Experts`; expert_ids as `rank * num_experts + slot`: the rank that computes a
    choice, and the expert's place there."""

    def __init__(self, own: Experts, num_experts: int, communicator: Communicator) -> None:
        """own: of this rank, as `OwnExperts` takes choices."""
        self._own, self._num_experts, self._communicator = own, num_experts, communicator

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """See `ops.Experts`. All ranks call it together."""
        targets, slots = expert_ids // self._num_experts, expert_ids % self._num_experts
        sent: list[Tensor] = []
        parts: list[Tensor] = []
        for rank in range(self._communicator.num_ranks):
            is_theirs = targets == rank
            tokens = is_theirs.any(1).nonzero()[:, 0]
            chosen = slots.masked_fill(~is_theirs, -1).to(torch.int32)
            sent.append(tokens)
            parts.append(torch.cat([_bytes(t[tokens]) for t in (x, chosen, weights)], dim=1))
        returned = self._exchange(self._computed(self._exchange(parts), x, weights))
        total = torch.zeros_like(widen(x))
        for tokens, found in zip(sent, returned, strict=True):
            total.index_add_(0, tokens, widen(found.view(x.dtype).view(-1, x.shape[1])))
        return total.to(x.dtype)

    def _computed(self, received: Sequence[Tensor], x: Tensor, weights: Tensor) -> list[Tensor]:
        """What each rank gets for the rows that it sent; x, weights: of the same dtypes and
        widths."""
        num_choices = weights.shape[1]
        widths = [x.shape[1] * x.itemsize, num_choices * 4, num_choices * weights.itemsize]
        rows = torch.cat(list(received)).view(-1, sum(widths))
        own, chosen, own_weights = (  # cloned: one row alone is contiguous, wherever it begins
            column.clone(memory_format=torch.contiguous_format).view(dtype)
            for column, dtype in zip(
                torch.split(rows, widths, 1), (x.dtype, torch.int32, weights.dtype), strict=True
            )
        )
        found = _bytes(self._own(own, chosen.to(torch.int64), own_weights))
        return list(torch.split(found, [part.numel() // sum(widths) for part in received]))

    def _exchange(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Bytes for each rank -> [N] of each rank."""
        return self._communicator.all_to_all([part.flatten() for part in parts])


def _bytes(x: Tensor) -> Tensor:
    """[N, ...] -> [N, bytes of a row] uint8."""
    return x.contiguous().view(torch.uint8)
