"""What linear layers of src/ do with their sums, as src/native.h numbers it."""

from __future__ import annotations

from ..ops import Activation

PANEL = 32  # output columns whose sums a tile holds, src/linear_output.h
PLAIN, FLOAT_OUTPUT = 0, 1
HALVES = 5
GATED: dict[Activation, int] = {"silu": 2, "gelu": 3, "gelu_tanh": 4}
