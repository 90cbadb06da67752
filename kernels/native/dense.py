"""Norm, and rotary embedding with the KV store; the C++ is in src/dense.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import RMSNorm
from .library import library


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    wide_weight = weight.float().contiguous()
    weight_at, size = wide_weight.data_ptr(), weight.shape[0]
    run = library().stemma_rms_norm

    def rms_norm(x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and wide_weight is not None
        y = torch.empty_like(x)
        residual_at = None if residual is None else residual.data_ptr()
        run(x.data_ptr(), residual_at, weight_at, eps, y.data_ptr(), x.shape[0], size)
        return y

    return rms_norm


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slots: Tensor
) -> None:
    num_tokens, num_all_heads, head_dim = heads.shape
    _, num_kv_heads, num_slots, _ = kv_layer.shape
    library().stemma_rotate_and_store(
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        kv_layer.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        num_all_heads - 2 * num_kv_heads,
        num_kv_heads,
        num_slots,
        head_dim,
    )
