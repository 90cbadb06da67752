"""Rotary embedding and the KV store, plain and quantized, in plain torch: the truth.

In 8 bits a vector with largest magnitude m has the scale m / 127 (int8) or m / 448 (float8_e4m3fn),
and x becomes the format's number nearest to x * (127 / m), ties to even, in float32. The quantized
input is what a plain pool would store. A vector with NaN or an infinity gets a scale that is not
finite either, so that the error stays visible. (Below 2e-36, where 448 / m overflows, all values
except zero become m.)

In 4 bits a vector is first transformed by a Hadamard matrix over sqrt(n), block after block of n
numbers, the largest power of two that divides head_dim, in float32: what is much larger than the
rest, as some numbers of keys are, is spread over all (QuaRot: Ashkboos et al. 2024). A product of
two vectors is that of their transforms, and the transform is its own inverse. Each half of what
results has a scale and a zero: y becomes the integer n of 0 to 15 that is nearest to
y / scale + zero. The scale is (high - low) * 0.97 / 15, of the half's smallest and largest number,
rounded to a byte (5 bits of exponent, 3 of fraction: 2^-20 to 3584; 255: NaN). The zero puts
(low + high) / 2 at 7.5, rounded to a byte that counts eighths from -8 on. (Of normal numbers it
loses less to cut the ends of the range.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import KVLayer
from .dense import widen

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
RANGE_KEPT = 0.97  # in 4 bits


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
    as_bytes(kv_layer.values)[:, :, slots] = as_bytes(values)
    kv_layer.scales[:, :, slots] = scales


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """`QuantizedKV`'s tensors, or slots of them -> [..., head_dim] float32."""
    if values.dtype is not torch.uint8:
        return values.to(torch.float32) * scales[..., None]
    numbers = torch.stack((values & 15, values >> 4), dim=-2).to(torch.float32)
    codes, zero_codes = scales[..., :2], scales[..., 2:]
    return hadamard(
        ((numbers - _zeros(zero_codes)[..., None]) * _scales(codes)[..., None]).flatten(-2)
    )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the first cos.shape[-1] elements of heads [T, any, head_dim], IN PLACE."""
    rotary_dim = cos.shape[-1]
    rotated = heads[..., :rotary_dim]
    half = rotary_dim // 2
    swapped = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
    rotated.copy_(widen(rotated) * widen(cos) + widen(swapped) * widen(sin))


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> its numbers in `dtype`, and float32 scales [...]; uint8: 4 bits, two
    numbers a byte, and their halves' scales and zeros [..., 4] uint8."""
    if dtype is torch.uint8:
        return _in_4_bits(x)
    largest = x.float().abs().amax(-1)
    limit = LARGEST[dtype]
    inverse = torch.full_like(largest, limit) / largest  # a number / a tensor rounds twice
    numbers = (x.float() * inverse[..., None]).nan_to_num(nan=0.0).clamp(-limit, limit)
    if dtype is torch.int8:
        numbers = numbers.round()
    return numbers.to(dtype), largest / limit


def _in_4_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    y = hadamard(x.float()).view(*x.shape[:-1], 2, -1)
    low, high = y.aminmax(dim=-1)  # [..., 2]
    codes = _codes((high - low) * (RANGE_KEPT / 15))
    inverse = 1.0 / _scales(codes)
    zero_codes = (15.5 - (low + high) * 0.5 * inverse) * 8
    zero_codes = zero_codes.nan_to_num(nan=0.0).round().clamp(0, 255).to(torch.uint8)
    numbers = y * inverse[..., None] + _zeros(zero_codes)[..., None]
    numbers = numbers.nan_to_num(nan=0.0).round().clamp(0, 15).to(torch.uint8)
    first, second = numbers.unbind(-2)
    return first | second << 4, torch.cat((codes, zero_codes), dim=-1)


_FIRST_CODE = 107 << 3  # of 2^-20: the exponent and 3 bits of fraction as float32 has them


def _codes(scales: Tensor) -> Tensor:
    bits = scales.contiguous().view(torch.int32)
    codes = ((bits + (1 << 19) >> 20) - _FIRST_CODE).clamp(0, 254)
    return torch.where(scales.isfinite(), codes, 255).to(torch.uint8)


def _scales(codes: Tensor) -> Tensor:
    scales = (codes.to(torch.int32) + _FIRST_CODE << 20).view(torch.float32)
    return scales.masked_fill_(codes == 255, torch.nan)


def _zeros(codes: Tensor) -> Tensor:
    return codes.to(torch.float32) * 0.125 - 8.0


def hadamard(x: Tensor) -> Tensor:
    """x [..., head_dim] times the orthogonal matrix above, in x's dtype. Number by number, so that
    the result of a vector does not depend on those beside it."""
    size = x.shape[-1] & -x.shape[-1]
    half = 1
    while half < size:
        first, second = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x * (1.0 / math.sqrt(size))


def as_bytes(values: Tensor) -> Tensor:
    """8-bit numbers as uint8, a view: torch does little with 8-bit floats."""
    return values.view(torch.uint8)


def _values(kv_layer: KVLayer) -> Tensor:
    return kv_layer if isinstance(kv_layer, Tensor) else kv_layer.values


def take_inputs(token_ids: Tensor, sources: Tensor, previous: Tensor) -> Tensor:
    return torch.where(sources >= 0, previous[sources.clamp(min=0)], token_ids)


def update_pages(page_table: Tensor, updates: Tensor) -> None:
    rows, columns, pages = updates[updates[:, 0] >= 0].unbind(1)
    page_table[rows.long(), columns.long()] = pages


class PageCopy:
    """See `ops.PageCopy`."""

    def __init__(self, layers: Sequence[Tensor], page_size: int) -> None:
        # Each [num_vectors, num_pages, page_size, width].
        self._layers = [
            layer.view(layer.shape[0], -1, page_size, layer.shape[2]) for layer in layers
        ]

    def pack(self, pages: Tensor, packed: Tensor) -> None:
        for layer, target in zip(self._layers, packed, strict=True):
            target.copy_(layer.index_select(1, pages))

    def unpack(self, pages: Tensor, packed: Tensor) -> None:
        for layer, source in zip(self._layers, packed, strict=True):
            layer.index_copy_(1, pages, source)
