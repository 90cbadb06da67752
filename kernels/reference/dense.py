"""Linear layers, activations, norm and lookups in plain torch: the truth.

Written for reading; norms and products of low-precision inputs go through float32, float64 stays
float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Activation, Linear, RMSNorm


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def make_output_linear(weight: Tensor) -> Linear:
    def output_linear(x: Tensor) -> Tensor:
        return widen(F.linear(x, weight))

    return output_linear


def make_gated_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    def gated_linear(x: Tensor) -> Tensor:
        return act_and_mul(F.linear(x, weight, bias))

    return gated_linear


def act_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    def rms_norm(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    return rms_norm


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index)


def widen(x: Tensor) -> Tensor:
    """float32, or float64 where x is float64."""
    return x if x.dtype is torch.float64 else x.float()
