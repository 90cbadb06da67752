"""Rotary embedding and the KV store, plain and quantized, in plain torch: the truth.

In 8 bits a vector with largest magnitude m has the scale m / 127 (int8) or m / 448 (float8_e4m3fn),
and x becomes the format's number nearest to x * (127 / m), ties to even, in float32. The quantized
input is what a plain pool would store. A vector with NaN or an infinity gets a scale that is not
finite either, so that the error stays visible. (Below 2e-36, where 448 / m overflows, all values
except zero become m.)

In 4 bits a vector is first transformed by a Hadamard matrix over sqrt(n), block after block of n
numbers, the largest power of two that divides head_dim, in float32: a number much larger than the
others, as keys have them, is spread over all (QuaRot: Ashkboos et al. 2024). With the smallest and
largest of what results, low and high, the scale is 0.95 * (high - low) / 15 and the lowest number
(low + high) / 2 - 7.5 * scale, both in bfloat16; y becomes the integer of 0 to 15 that is nearest to
(y - lowest) / scale. (The ends of the range are cut: of normal numbers that loses 5% less than
keeping them.) A product of two vectors is that of their transforms, and the transform is its own
inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import KVLayer
from .dense import widen

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
RANGE_KEPT = 0.95  # in 4 bits


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
    numbers = torch.cat((values & 15, values >> 4), dim=-1).to(torch.float32)
    scale, lowest = scales.to(torch.float32).split(1, dim=-1)
    return hadamard(numbers * scale + lowest)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates the first cos.shape[-1] elements of heads [T, any, head_dim], IN PLACE."""
    rotary_dim = cos.shape[-1]
    rotated = heads[..., :rotary_dim]
    half = rotary_dim // 2
    swapped = torch.cat((rotated[..., half:], rotated[..., :half]), dim=-1)
    rotated.copy_(widen(rotated) * widen(cos) + widen(swapped) * widen(sin))


def quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> its numbers in `dtype`, and float32 scales [...]; uint8: 4 bits, two
    numbers a byte, and their scales and lowest numbers [..., 2] bfloat16."""
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
    y = hadamard(x.float())
    low, high = y.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) * (RANGE_KEPT / 15)).bfloat16()
    lowest = ((low + high) * 0.5 - scale.float() * 7.5).bfloat16()
    inverse = 1.0 / scale.float()
    numbers = ((y - lowest.float()) * inverse).nan_to_num(nan=0.0).round().clamp(0, 15)
    first, second = numbers.to(torch.uint8).chunk(2, dim=-1)
    return first | second << 4, torch.cat((scale, lowest), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """x [..., head_dim] times the orthogonal matrix above, in x's dtype. Number by number, so that
    the result of a vector does not depend on those beside it."""
    size = x.shape[-1] & -x.shape[-1]
    half = 1
    while half < size:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x * size**-0.5


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
