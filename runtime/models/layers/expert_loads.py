"""How often tokens chose each expert, counted beside the steps.

Layers note what their router chose; behind the last one all of them are added up at once, on the
device and without waiting for it. On a CPU what is noted of a few tokens is kept for some passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....kernels.context_share import ALL_TOKENS
from ...checkpoint.config.model_config import ExpertsConfig
from ..forward_batch import ForwardBatch
from .expert_placement import ONE_GROUP, ExpertGroups, group_loads

_FEW = 16  # tokens of which a layer's whole order of experts may be kept
_MOST_KEPT = 128  # tokens, so that they take some megabytes

NoteChoices = Callable[[Tensor, ForwardBatch], None]
"""expert_ids [T, K] int64 that a pass's tokens chose, and the pass."""


class ExpertLoads:
    """Counts since the start, or since `clear`: [layers with experts, num_experts] int64.

    The layers that there are here, consecutive ones with experts, note one after the other.
    """

    def __init__(
        self,
        experts: ExpertsConfig,
        device: torch.device,
        groups: ExpertGroups = ONE_GROUP,
        first_layer: int = 0,
    ) -> None:
        """first_layer: the model's layer that is this process's first, see `Stage`."""
        self._first_layer = first_layer
        self._placements = {
            layer: groups.placement(layer, experts.num_experts) for layer in experts.layers
        }
        self.layers = experts.layers
        self._counts = torch.zeros(
            len(experts.layers), experts.num_experts, dtype=torch.int64, device=device
        )
        self._starts = torch.arange(len(experts.layers), device=device) * experts.num_experts
        self._first, self._end = len(experts.layers), 0  # rows of the layers here
        self._noted: list[Tensor] = []  # of the layers so far
        self._forget_kept()

    def of_layer(self, layer: int) -> NoteChoices:
        """What a layer that is made calls in each pass; layer: its place among the model's."""
        row = self.layers.index(layer)
        self._first, self._end = min(self._first, row), row + 1
        return partial(self._note, row)

    def clear(self) -> None:
        """Forget what was counted."""
        self._forget_kept()
        self._counts.zero_()

    def by_layer(self) -> dict[int, list[int]]:
        """The counts of each layer's experts; waits for the device."""
        self._add_kept()
        return dict(zip(self.layers, self._counts.tolist(), strict=True))

    def describe(self) -> dict[str, Any]:
        """By the layer's index the `loads`, their `imbalance`, and that of what groups of ranks
        have to do."""
        loads = self.by_layer()
        of_groups = {
            layer: group_loads(self._placements[layer], counts) for layer, counts in loads.items()
        }
        return {
            "loads": self._by_number(loads),
            "imbalance": self._by_number({n: imbalance_of(each) for n, each in loads.items()}),
            "group_imbalance": self._by_number(
                {n: imbalance_of(each) for n, each in of_groups.items()}
            ),
        }

    def _by_number(self, values: Mapping[int, Any]) -> dict[str, Any]:
        return {str(self._first_layer + layer): value for layer, value in values.items()}

    def _note(self, row: int, expert_ids: Tensor, batch: ForwardBatch) -> None:
        if row == self._first:
            self._noted.clear()  # of a pass that did not come to its end
        if len(expert_ids) > _FEW:  # else a view, perhaps, of all experts in their order
            expert_ids = expert_ids.contiguous()
        self._noted.append(expert_ids)
        if row == self._end - 1:
            self._end_pass(batch)

    def _end_pass(self, batch: ForwardBatch) -> None:
        noted, self._noted = self._noted, []
        if batch.num_tokens is not None:  # perhaps in a graph
            chosen = torch.stack(noted)
            self._add(chosen.clamp(min=0), (chosen >= 0).to(torch.int64))
            return
        if batch.tokens is not ALL_TOKENS:
            noted = list(batch.tokens.gather(torch.stack(noted, 1)).unbind(1))
        self._kept.append(noted)
        self._num_kept += len(noted[0])
        if self._num_kept >= _MOST_KEPT:
            self._add_kept()

    def _add_kept(self) -> None:
        if self._kept:
            chosen = torch.stack([torch.cat(layer) for layer in zip(*self._kept, strict=True)])
            self._add(chosen, torch.ones_like(chosen))
            self._forget_kept()

    def _forget_kept(self) -> None:
        self._kept: list[list[Tensor]] = []
        self._num_kept = 0

    def _add(self, chosen: Tensor, times: Tensor) -> None:
        """chosen [layers, T, K]; times: as often as each counts, in a shape that fits."""
        places = chosen + self._starts[self._first : self._end, None, None]
        times = times.expand_as(chosen).flatten()
        self._counts.view(-1).scatter_add_(0, places.flatten(), times)


def imbalance_of(loads: Sequence[float]) -> float:
    """The largest over the mean: 1 where all are equal, and where all are 0."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
