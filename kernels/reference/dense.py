"""Linear, norm, rotary embedding, activation and KV store in plain torch: the truth.

Written for reading; norms and products of low-precision inputs go through float32, float64 stays
float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Linear, RMSNorm


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    def linear(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return linear


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    def rms_norm(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    return rms_norm


def apply_rope(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.copy_(heads * cos + swapped * sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(kv_layer: Tensor, slots: Tensor, kv: Tensor) -> None:
    kv_layer[:, :, slots] = kv.permute(1, 2, 0, 3)


def widen(x: Tensor) -> Tensor:
    """float32, or float64 where x is float64."""
    return x if x.dtype is torch.float64 else x.float()
