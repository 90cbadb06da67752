"""Scales that are powers of two, stored as exponents (E8M0: OCP Microscaling Formats, 5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

_BIAS = 127
NOT_A_NUMBER = 255


def powers_of_two(exponents: Tensor, *, divided_by: int = 1) -> Tensor:
    """exponents uint8 -> float32; divided_by: a power of two. NaN for `NOT_A_NUMBER`."""
    bias = _BIAS + divided_by.bit_length() - 1
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.int() - bias)
    return powers.masked_fill_(exponents == NOT_A_NUMBER, torch.nan)
