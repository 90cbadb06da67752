"""Quantized tensors: a linear layer's weight, one layer's KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

import torch
from torch import Tensor

# Of a float with a sign, 2 bits of exponent and 1 of mantissa (OCP Microscaling Formats, 5.3.3),
# twice its value, by its bits.
E2M1_NUMBERS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out_features, in_features]; every `group_size` inputs of a row have a scale:

        weight = scale * number + offset

    A number is a signed integer: of 8 bits in [-128, 127], of 4 bits in [-8, 7]; or it is what a
    code of 4 bits stands for (`codes`). Weights of experts have one more axis, [num_experts, ...],
    in front of all tensors.
    """

    bits: Literal[8, 4]
    group_size: int  # divides in_features
    # 8 bits: [out_features, in_features] int8. 4 bits: [out_features, in_features / 2] uint8, each
    # number plus 8, that of an even input in the low half of its byte.
    values: Tensor
    scales: Tensor  # [out_features, in_features / group_size], floating
    offsets: Tensor | None  # as scales; None: all 0
    # "int8": the product may round each row of its input to 8 bits, with one scale a row (W8A8).
    activations: Literal["exact", "int8"] = "exact"
    # [in_features] int32: number i of a row belongs to input input_order[i], so that the numbers of
    # a group are consecutive even if its inputs are not (GPTQ's act-order). None: to input i.
    input_order: Tensor | None = None
    # "fp4": in place of a number plus 8, `values` have codes, which stand for E2M1_NUMBERS.
    codes: Literal["integer", "fp4"] = "integer"

    @property
    def out_features(self) -> int:
        return self.values.shape[-2]

    @property
    def in_features(self) -> int:
        return self.values.shape[-1] * (8 // self.bits)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """All tensors that are not None."""
        tensors = (self.values, self.scales, self.offsets, self.input_order)
        return [tensor for tensor in tensors if tensor is not None]

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """A copy with each tensor changed."""
        return replace(
            self,
            values=change(self.values),
            scales=change(self.scales),
            offsets=None if self.offsets is None else change(self.offsets),
            input_order=None if self.input_order is None else change(self.input_order),
        )


def experts_of(weight: Tensor | QuantizedWeight) -> Iterator[Tensor | QuantizedWeight]:
    """Each one of a stack [num_experts, ...], as views."""
    if isinstance(weight, Tensor):
        yield from weight
        return
    for index in range(len(weight.values)):
        yield weight.map(itemgetter(index))


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """One layer's KV, by the rules of reference/kv_store.py.

    8 bits: a key or value is its numbers times its scale. 4 bits (uint8): number i of a vector is
    in the low bits of byte i, number i + head_dim / 2 in its high bits; each half of them, less its
    zero and times its scale, is a half of the Hadamard transform of the key or value.
    """

    # [2, num_kv_heads, num_slots, head_dim] int8 or float8_e4m3fn, or [..., head_dim / 2] uint8
    values: Tensor
    # [2, num_kv_heads, num_slots] float32, or of 4 bits [..., 4] uint8: scales, then zeros
    scales: Tensor

    @property
    def is_packed(self) -> bool:
        """Two numbers a byte."""
        return self.values.dtype is torch.uint8

    @property
    def head_dim(self) -> int:
        return self.values.shape[-1] * (2 if self.is_packed else 1)


def head_dim_of(kv_layer: Tensor | QuantizedKV) -> int:
    """Numbers of a head's key."""
    return kv_layer.shape[-1] if isinstance(kv_layer, Tensor) else kv_layer.head_dim
