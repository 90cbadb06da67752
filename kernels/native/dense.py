"""Norm, rotary embedding with the KV store, and lookups; the C++ is in src/dense.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..cpu import dense as cpu
from ..ops import KVLayer, RMSNorm
from .calls import kernel


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    wide_weight = weight.float().contiguous()
    weight_at, size = wide_weight.data_ptr(), weight.shape[0]
    run = kernel("stemma_rms_norm")

    def rms_norm(x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and wide_weight is not None
        y = torch.empty_like(x)
        residual_at = None if residual is None else residual.data_ptr()
        run(x.data_ptr(), residual_at, weight_at, eps, y.data_ptr(), x.shape[0], size)
        return y

    return rms_norm


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: KVLayer, slots: Tensor
) -> None:
    num_tokens, num_all_heads, head_dim = heads.shape
    if cos.shape[-1] != head_dim:
        # NOTE: of torch calls, so that a step of such a model is not recorded (see `capture`).
        return cpu.rotate_and_store(heads, cos, sin, kv_layer, slots)
    assert isinstance(kv_layer, Tensor), "quantized KV is for the reference and for GPUs"
    _, num_kv_heads, num_slots, _ = kv_layer.shape
    _rotate_and_store()(
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


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    rows = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype)
    row_bytes = table.stride(0) * table.itemsize
    _gather_rows()(table.data_ptr(), index.data_ptr(), rows.data_ptr(), len(index), row_bytes)
    return rows


@functools.cache
def _rotate_and_store() -> Callable[..., None]:
    return kernel("stemma_rotate_and_store")


@functools.cache
def _gather_rows() -> Callable[..., None]:
    return kernel("stemma_gather_rows")
