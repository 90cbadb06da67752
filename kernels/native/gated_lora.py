"""Gated linear layers with adapters, over one packed weight; the C++ is in src/.

Without an adapter the activation is applied in the product's registers. With one the same sums are
stored in float32, the adapter is added there, and the activation is a separate call: a row without
an adapter gets the same numbers in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import Activation, Lora
from .calls import kernel
from .packed_linear import GATED, PackedLinear


class GatedLinearWithLora:
    """See `ops.GatedLinearWithLora`."""

    def __init__(self, gated: PackedLinear, activation: Activation, lora: Lora) -> None:
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
