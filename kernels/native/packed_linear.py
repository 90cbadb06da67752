"""The common part of linear layers over packed weights, of 16 bits and of fewer."""

from __future__ import annotations

import copy
import ctypes
from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from ..ops import Activation

PANEL = 32  # output columns whose sums a tile holds, src/linear_output.h
# What is done with the sums, as numbered in src/native.h.
PLAIN, FLOAT_OUTPUT = 0, 1
HALVES = 5
GATED: dict[Activation, int] = {"silu": 2, "gelu": 3, "gelu_tanh": 4}


class PackedLinear(ABC):
    """Owns the packed weight; the C++ receives the address of a record of pointers into it."""

    def __init__(self, record: Any, num_outputs: int, dtype: torch.dtype) -> None:
        """`record`: a ctypes.Structure with a field `kind`; dtype: the input's."""
        self._set(record, num_outputs, dtype)

    @abstractmethod
    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in_features] bfloat16 -> [T, num_outputs]: `out`, or a new tensor"""

    def _result(self, num_tokens: int, out: Tensor | None) -> Tensor:
        if out is not None:
            return out
        return torch.empty((num_tokens, self._num_outputs), dtype=self._dtype)

    def halves(self) -> Self:
        """A gated layer that returns the plain sums, [T, 2 * size] float32, gates first."""
        other, record = copy.copy(self), type(self._record).from_buffer_copy(self._record)
        record.kind = HALVES
        other._set(record, 2 * self._num_outputs, torch.float32)
        return other

    def _set(self, record: Any, num_outputs: int, dtype: torch.dtype) -> None:
        self._record = record
        self._address = ctypes.addressof(record)
        self._num_outputs, self._dtype = num_outputs, dtype
