"""Rotary embedding and the KV store, plain and quantized, in plain torch: the truth.

A number x of a vector with largest magnitude m becomes round(x / scale) with scale = m / 127 in
int8, ties to even; float8_e4m3fn rounds x / scale with scale = m / 448 to its nearest, ties to
even. What is quantized is what a plain pool would hold. A vector with NaN or an infinity keeps a
scale that is not finite, so that it is not read as numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import KVLayer
from ..quantized_kv import QuantizedKV
from .dense import widen

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rotate_and_store(
    heads: Tensor, cos: Tensor, sin: Tensor, kv_layer: KVLayer, slots: Tensor
) -> None:
    num_kv_heads = _values(kv_layer).shape[1]
    rotate(heads[:, :-num_kv_heads], cos, sin)
    store_kv(heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:], kv_layer, slots)


def store_kv(k: Tensor, v: Tensor, kv_layer: KVLayer, slots: Tensor) -> None:
    kv = torch.stack((k, v)).transpose(1, 2)
    if isinstance(kv_layer, Tensor):
        kv_layer[:, :, slots] = kv
        return
    values, scales = quantized(kv, kv_layer.values.dtype)
    as_bytes(kv_layer)[:, :, slots] = values.view(torch.uint8)
    kv_layer.scales[:, :, slots] = scales


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The first cos.shape[-1] elements of heads [T, any, head_dim], IN PLACE."""
    rotary_dim = cos.shape[-1]
    rotated = heads[..., :rotary_dim]
    half = rotary_dim // 2
    swapped = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
    rotated.copy_(widen(rotated) * widen(cos) + widen(swapped) * widen(sin))


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> its numbers in `dtype`, and float32 scales [...]."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[dtype]
    divisors = torch.where(scales == 0, 1.0, scales)
    numbers = wide / divisors[..., None]
    if dtype is torch.int8:
        numbers = numbers.nan_to_num().round()
    return numbers.to(dtype), scales


def as_bytes(kv_layer: QuantizedKV) -> Tensor:
    """The values as uint8: torch indexes few kinds of 8-bit floats."""
    return kv_layer.values.view(torch.uint8)


def _values(kv_layer: KVLayer) -> Tensor:
    return kv_layer if isinstance(kv_layer, Tensor) else kv_layer.values
