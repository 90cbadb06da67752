"""Norm, rotary embedding with the KV store, and lookups; the C++ is in src/dense.cpp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..ops import KVLayer, QueryKeyNorm, RMSNorm
from .calls import kernel
from .kv_format import kv_format


def make_rms_norm(weight: Tensor, eps: float) -> RMSNorm:
    wide_weight = weight.float().contiguous()
    weight_at, size = wide_weight.data_ptr(), weight.shape[0]
    run = kernel("stemma_rms_norm")

    def rms_norm(x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        assert x.is_contiguous() and wide_weight is not None
        y = torch.empty_like(x) if out is None else out
        residual_at = None if residual is None else residual.data_ptr()
        run(x.data_ptr(), residual_at, weight_at, eps, y.data_ptr(), x.shape[0], size)
        return y

    return rms_norm


def make_query_key_norm(
    query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> QueryKeyNorm:
    weights = [query_weight.float().contiguous(), key_weight.float().contiguous()]
    run = kernel("stemma_norm_slices")

    def query_key_norm(heads: Tensor) -> None:
        assert heads.is_contiguous()
        num_tokens, num_all_heads, head_dim = heads.shape
        at = heads.data_ptr()
        for weight, num in zip(weights, (num_heads, num_kv_heads), strict=True):
            size = len(weight)
            num_slices = num * head_dim // size
            stride = num_all_heads * head_dim
            run(at, weight.data_ptr(), eps, num_tokens, stride, num_slices, size)
            at += num * head_dim * heads.itemsize

    return query_key_norm


def scale_in_place(x: Tensor, factor: float) -> None:
    assert x.is_contiguous()
    _scale()(x.data_ptr(), float(factor), x.shape[0], x.shape[1])


def add_in_place(total: Tensor, x: Tensor) -> None:
    assert total.is_contiguous() and x.is_contiguous()
    _add()(total.data_ptr(), x.data_ptr(), x.shape[0], x.shape[1])


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: KVLayer, slots: Tensor
) -> None:
    num_tokens, num_all_heads, head_dim = heads.shape
    format_number, values, scales = kv_format(kv_layer)
    _, num_kv_heads, num_slots, _ = values.shape
    _rotate_and_store()(
        heads.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        slots.data_ptr(),
        num_tokens,
        num_all_heads - 2 * num_kv_heads,
        num_kv_heads,
        num_slots,
        head_dim,
        cos.shape[-1],
        format_number,
    )


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    rows = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype)
    row_bytes = table.stride(0) * table.itemsize
    _gather_rows()(table.data_ptr(), index.data_ptr(), rows.data_ptr(), len(index), row_bytes)
    return rows


def join_columns(first: Tensor, second: Tensor) -> Tensor:
    assert first.is_contiguous() and second.is_contiguous()
    num_rows, sizes = len(first), (first.shape[1], second.shape[1])
    joined = torch.empty((num_rows, sum(sizes)), dtype=first.dtype)
    widths = [size * first.itemsize for size in sizes]
    _join_columns()(first.data_ptr(), second.data_ptr(), joined.data_ptr(), num_rows, *widths)
    return joined


def gather_share(table: Tensor, index: Tensor, first: int) -> Tensor:
    rows = torch.empty((len(index), *table.shape[1:]), dtype=table.dtype)
    row_bytes = table.stride(0) * table.itemsize
    _gather_share()(
        table.data_ptr(),
        index.data_ptr(),
        rows.data_ptr(),
        len(index),
        row_bytes,
        first,
        len(table),
    )
    return rows


@functools.cache
def _rotate_and_store() -> Callable[..., None]:
    return kernel("stemma_rotate_and_store")


@functools.cache
def _scale() -> Callable[..., None]:
    return kernel("stemma_scale")


@functools.cache
def _add() -> Callable[..., None]:
    return kernel("stemma_add")


@functools.cache
def _gather_share() -> Callable[..., None]:
    return kernel("stemma_gather_share")


@functools.cache
def _join_columns() -> Callable[..., None]:
    return kernel("stemma_join_columns")


@functools.cache
def _gather_rows() -> Callable[..., None]:
    return kernel("stemma_gather_rows")
