"""Low-rank adapters on a CPU: two small products for each adapter of a step.

The scheduler's order puts rows of one adapter side by side, as they share a root of the radix tree,
so a group of tokens is a slice of `x` and `y` and is computed in place. In between, `x A.T` is in
the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Lora


@dataclass(frozen=True, slots=True)
class LoraRuns:
    """Maximal runs of consecutive tokens of one adapter."""

    runs: tuple[tuple[int, int, int], ...]  # (slot, first token, end)


def plan_lora(
    slots: npt.NDArray[np.int32], num_slots: int, padded_tokens: int | None = None
) -> LoraRuns:
    edges = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    runs = [(int(slots[first]), first, end) for first, end in pairwise(edges)]
    return LoraRuns(tuple(run for run in runs if run[0] > 0))


def make_lora(a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
    """`y` may also be float32."""
    max_rank = b.shape[2]
    ends = list(accumulate(out_features))
    parts = [
        (slice(end - size, end), slice(part * max_rank, (part + 1) * max_rank))
        for part, (size, end) in enumerate(zip(out_features, ends))
    ]

    def lora(x: Tensor, y: Tensor, plan: object) -> None:
        assert isinstance(plan, LoraRuns), "a plan of this backend"
        for slot, first, end in plan.runs:
            shrunk = F.linear(x[first:end], a[slot - 1])
            for columns, ranks in parts:
                own = y[first:end, columns]
                if y.dtype is x.dtype:
                    torch.addmm(own, shrunk[:, ranks], b[slot - 1, columns].T, out=own)
                else:
                    own += F.linear(shrunk[:, ranks], b[slot - 1, columns])

    return lora
