"""Low-rank adapters in plain torch: the truth. One product after the other, adapter by adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..ops import (
    ActAndMul,
    Activation,
    GatedLinearWithLora,
    Lora,
    MakeGatedLinearWithLora,
    MakeLinear,
    Weight,
)
from .dense import widen


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """A step's tokens by adapter; tokens without one are in no group."""

    groups: tuple[tuple[int, npt.NDArray[np.int64]], ...]  # (slot, tokens in ascending order)


def plan_lora(
    slots: npt.NDArray[np.int32], num_slots: int, padded_tokens: int | None = None
) -> LoraGroups:
    used = np.unique(slots)
    return LoraGroups(tuple((int(s), np.flatnonzero(slots == s)) for s in used if s > 0))


def make_lora(a: Tensor, b: Tensor, out_features: Sequence[int]) -> Lora:
    max_rank = b.shape[2]
    ends = list(accumulate(out_features))

    def lora(x: Tensor, y: Tensor, plan: object) -> None:
        assert isinstance(plan, LoraGroups), "a plan of this backend"
        for slot, indices in plan.groups:
            tokens = torch.from_numpy(indices).to(x.device)
            shrunk = widen(x[tokens]) @ widen(a[slot - 1]).T
            for part, (size, end) in enumerate(zip(out_features, ends)):
                columns = slice(end - size, end)
                own = shrunk[:, part * max_rank : (part + 1) * max_rank]
                added = own @ widen(b[slot - 1, columns]).T
                y[tokens, columns] = (widen(y[tokens, columns]) + added).to(y.dtype)

    return lora


def gated_linear_with_lora_of(
    make_linear: MakeLinear, act_and_mul: ActAndMul
) -> MakeGatedLinearWithLora:
    """Makes a layer that calls product, adapter and activation in turn."""

    def make(
        weight: Weight, bias: Tensor | None, activation: Activation, lora: Lora
    ) -> GatedLinearWithLora:
        linear = make_linear(weight, bias)

        def gated_linear(x: Tensor, plan: object | None) -> Tensor:
            y = linear(x)
            if plan is not None:
                lora(x.contiguous(), y, plan)
            return act_and_mul(y, activation)

        return gated_linear

    return make
