"""Gated linear layers with adapters, over one packed weight; the C++ is in src/.

Without an adapter the activation is taken in the product's registers. With one the same sums are
stored in float32, the adapter is added there, and the activation is another call: a row without an
adapter gets the same numbers in both.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..ops import Activation, Linear, Lora
from .calls import kernel
from .linear_kinds import GATED


class PackedGated(Protocol):
    """A gated layer of `linear` or `quantized_linear`."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, size]."""
        ...

    def halves(self) -> Linear:
        """Gates and ups, [T, in_features] -> [T, 2 * size] float32."""
        ...


class GatedLinearWithLora:
    """See `ops.GatedLinearWithLora`."""

    def __init__(self, gated: PackedGated, activation: Activation, lora: Lora) -> None:
        self._gated, self._halves, self._lora = gated, gated.halves(), lora
        self._kind = GATED[activation]
        self._act_and_mul = kernel("stemma_act_and_mul")

    def __call__(self, x: Tensor, plan: object | None) -> Tensor:
        x = x.contiguous()
        if plan is None:
            return self._gated(x)
        halves = self._halves(x)
        self._lora(x, halves, plan)
        num_rows, size = x.shape[0], halves.shape[1] // 2
        y = torch.empty((num_rows, size), dtype=x.dtype)
        self._act_and_mul(halves.data_ptr(), y.data_ptr(), num_rows, size, self._kind)
        return y
