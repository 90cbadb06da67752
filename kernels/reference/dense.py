"""Linear layers, activations, norm and lookups in plain torch: the ground truth.

Written for readability; norms and products of low-precision inputs are computed in float32, float64
stays float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import (
    Activation,
    HeadLinear,
    Linear,
    MakeQueryKeyNorm,
    MakeRMSNorm,
    OutputLinear,
    QueryKeyNorm,
    RMSNorm,
    Weight,
)
from .quantized import quantized_product


def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
    def linear(x: Tensor) -> Tensor:
        return product(x, weight, bias)

    return linear


def make_output_linear(weight: Weight) -> OutputLinear:
    def output_linear(x: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(weight, Tensor):
            return placed(widen(F.linear(x, weight)), out)
        return placed(quantized_product(x, weight, None), out)

    return output_linear


def make_gated_linear(
    weight: Weight, bias: Tensor | None, activation: Activation = "silu"
) -> Linear:
    def gated_linear(x: Tensor) -> Tensor:
        return act_and_mul(product(x, weight, bias), activation)

    return gated_linear


def make_head_linear(weight: Tensor) -> HeadLinear:
    def head_linear(x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    return head_linear


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in the dtype of x."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return quantized_product(x, weight, bias).to(x.dtype)


def act_and_mul(gate_up: Tensor, activation: Activation = "silu") -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="none" if activation == "gelu" else "tanh") * up


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    def rms_norm(x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return placed((normed.to(weight.dtype) * weight).to(x.dtype), out)

    return rms_norm


def scale_in_place(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def add_in_place(total: Tensor, x: Tensor) -> None:
    total.add_(x)


def sigmoid(x: Tensor) -> Tensor:
    """Of equal bits wherever a number stands: torch's own computes the last numbers of a tensor,
    which fill no register, by another formula."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), of equal bits wherever a number stands."""
    return sigmoid(x).mul_(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), of equal bits wherever a number stands."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index)


def join_columns(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=-1)


def gather_share(table: Tensor, index: Tensor, first: int) -> Tensor:
    own = index - first
    is_other = (own < 0) | (own >= len(table))
    rows = table.index_select(0, own.masked_fill(is_other, 0))
    return rows.masked_fill_(is_other.view(-1, *[1] * (table.dim() - 1)), 0.0)


def placed(x: Tensor, out: Tensor | None) -> Tensor:
    """x where it is wanted; None: where it is."""
    return x if out is None else out.copy_(x)


def widen(x: Tensor) -> Tensor:
    """To float32, or float64 if x is float64."""
    return x if x.dtype is torch.float64 else x.float()


def query_key_norm_of(make_rms_norm: MakeRMSNorm) -> MakeQueryKeyNorm:
    def make_query_key_norm(
        query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> QueryKeyNorm:
        norm_query, norm_key = make_rms_norm(query_weight, eps), make_rms_norm(key_weight, eps)

        def query_key_norm(heads: Tensor) -> None:
            queries, keys = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads]
            queries.copy_(norm_query(queries.reshape(-1, len(query_weight))).view(queries.shape))
            keys.copy_(norm_key(keys.reshape(-1, len(key_weight))).view(keys.shape))

        return query_key_norm

    return make_query_key_norm
