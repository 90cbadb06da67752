"""Linear layers over packed weights in bfloat16 or float32; the C++ is in src/linear.cpp.

If in_features is odd, as in no real model, plain torch runs instead of the pairs of bfloat16.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..ops import Activation, GatedLinearWithLora, Linear, Lora, OutputLinear, Weight
from ..quantized_tensors import QuantizedWeight
from ..reference import dense as reference
from ..reference.lora import gated_linear_with_lora_of
from . import quantized_linear
from .arena import packed_weights
from .bindings import library
from .calls import kernel
from .gated_lora import GatedLinearWithLora as PackedWithLora
from .packed_linear import FLOAT_OUTPUT, GATED, PANEL, PLAIN, PackedLinear


class _Record(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("is_float", ctypes.c_int32),
    )


def make_linear(weight: Weight, bias: Tensor | None) -> Linear:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.make_linear(weight, bias)
    if not can_pack(weight):
        return reference.make_linear(weight, bias)
    return _Packed(weight, bias, PLAIN, weight.shape[0], weight.dtype)


def make_output_linear(weight: Weight) -> OutputLinear:
    """The float32 sums, not rounded."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.make_output_linear(weight)
    if not can_pack(weight):
        return reference.make_output_linear(weight)
    return _Packed(weight, None, FLOAT_OUTPUT, weight.shape[0], torch.float32)


def make_gated_linear(
    weight: Weight, bias: Tensor | None, activation: Activation = "silu"
) -> Linear:
    """A panel is 16 gates and their 16 ups, so that they are multiplied in registers."""
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.make_gated_linear(weight, bias, activation)
    if not can_pack(weight):
        return reference.make_gated_linear(weight, bias, activation)
    size = weight.shape[0] // 2
    return _Packed(
        _interleaved(weight),
        None if bias is None else _interleaved(bias),
        GATED[activation],
        size,
        weight.dtype,
    )


def make_gated_linear_with_lora(
    weight: Weight, bias: Tensor | None, activation: Activation, lora: Lora
) -> GatedLinearWithLora:
    gated = make_gated_linear(weight, bias, activation)
    if isinstance(gated, PackedLinear):
        return PackedWithLora(gated, activation, lora)
    by_torch = gated_linear_with_lora_of(make_linear, reference.act_and_mul)
    return by_torch(weight, bias, activation, lora)


def can_pack(weight: Tensor) -> bool:
    """Whether the compiled kernel takes it."""
    return weight.dtype is torch.float32 or weight.shape[1] % 2 == 0


class _Packed(PackedLinear):
    def __init__(
        self, weight: Tensor, bias: Tensor | None, kind: int, num_outputs: int, dtype: torch.dtype
    ) -> None:
        num_rows, num_inputs = weight.shape
        num_panels = -(-num_rows // PANEL)
        row_bytes = num_inputs * weight.itemsize
        self._panels = packed_weights.take(num_panels * PANEL * row_bytes)
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(num_panels * PANEL, dtype=torch.float32)
            self._bias[:num_rows] = bias
        rows = weight.contiguous()  # a copy must live as long as the call
        library().stemma_pack(rows.data_ptr(), num_rows, row_bytes // 4, self._panels.data_ptr())
        record = _Record(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            num_inputs,
            num_outputs,
            num_panels,
            kind,
            weight.dtype is torch.float32,
        )
        super().__init__(record, num_outputs, dtype)
        self._run = kernel("stemma_linear")

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x, y = x.contiguous(), self._result(len(x), out)
        self._run(self._address, x.data_ptr(), y.data_ptr(), x.shape[0])
        return y


def _interleaved(stacked: Tensor) -> Tensor:
    """[2 * size, ...], gates first -> panels of 16 gates and 16 ups, padded with zeros."""
    size, half = stacked.shape[0] // 2, PANEL // 2
    num_panels = -(-size // half)
    panels = stacked.new_zeros((num_panels, 2, half, *stacked.shape[1:]))
    for index, part in enumerate((stacked[:size], stacked[size:])):
        padded = stacked.new_zeros((num_panels * half, *stacked.shape[1:]))
        padded[:size] = part
        panels[:, index] = padded.view(num_panels, half, *stacked.shape[1:])
    return panels.reshape(num_panels * PANEL, *stacked.shape[1:])
