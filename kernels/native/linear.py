"""Linear layers over weights packed for vdpbf16ps; the C++ is in src/linear.cpp.

Where in_features is odd, which no real model has, plain torch runs instead.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..ops import Linear
from ..reference import dense as reference
from .arena import Arena
from .bindings import library
from .calls import kernel

_PANEL = 32  # output columns, src/linear.cpp
_PLAIN, _FLOAT_OUTPUT, _GATED = 0, 1, 2


_arena = Arena()


class _PackedLinear(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("kind", ctypes.c_int32),
    )


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.shape[1] % 2:
        return reference.make_linear(weight, bias)
    return _Packed(weight, bias, _PLAIN, weight.shape[0], torch.bfloat16)


def make_output_linear(weight: Tensor) -> Linear:
    """The float32 sums as they are, not rounded."""
    if weight.shape[1] % 2:
        return reference.make_output_linear(weight)
    return _Packed(weight, None, _FLOAT_OUTPUT, weight.shape[0], torch.float32)


def make_gated_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A panel is 16 gates and their 16 ups, so that their product is taken in registers."""
    if weight.shape[1] % 2:
        return reference.make_gated_linear(weight, bias)
    size = weight.shape[0] // 2
    return _Packed(
        _interleaved(weight),
        None if bias is None else _interleaved(bias),
        _GATED,
        size,
        torch.bfloat16,
    )


class _Packed:
    """Owns the packed weight; the C++ gets the address of a record of pointers into it."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kind: int, num_outputs: int, dtype: torch.dtype
    ) -> None:
        num_rows, num_inputs = weight.shape
        num_panels = -(-num_rows // _PANEL)
        self._panels = _arena.take(num_panels * _PANEL * num_inputs)
        self._bias: Tensor | None = None
        if bias is not None:
            self._bias = torch.zeros(num_panels * _PANEL, dtype=torch.float32)
            self._bias[:num_rows] = bias
        library().stemma_pack(
            weight.contiguous().data_ptr(), num_rows, num_inputs, self._panels.data_ptr()
        )
        self._record = _PackedLinear(
            self._panels.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            num_inputs,
            num_outputs,
            num_panels,
            kind,
        )
        self._address = ctypes.addressof(self._record)
        self._num_outputs = num_outputs
        self._dtype = dtype
        self._run = kernel("stemma_linear")

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty((x.shape[0], self._num_outputs), dtype=self._dtype)
        self._run(self._address, x.data_ptr(), y.data_ptr(), x.shape[0])
        return y


def _interleaved(stacked: Tensor) -> Tensor:
    """[2 * size, ...], gates first -> panels of 16 gates and 16 ups, padded with zeros."""
    size, half = stacked.shape[0] // 2, _PANEL // 2
    num_panels = -(-size // half)
    panels = stacked.new_zeros((num_panels, 2, half, *stacked.shape[1:]))
    for index, part in enumerate((stacked[:size], stacked[size:])):
        padded = stacked.new_zeros((num_panels * half, *stacked.shape[1:]))
        padded[:size] = part
        panels[:, index] = padded.view(num_panels, half, *stacked.shape[1:])
    return panels.reshape(num_panels * _PANEL, *stacked.shape[1:])
