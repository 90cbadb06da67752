"""Activations by themselves, where no kernel multiplies their result at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from ....kernels.reference.dense import sigmoid, widen


def gelu_tanh(x: Tensor) -> Tensor:
    """x * (1 + tanh(y / 2)) / 2 = x * sigmoid(y), rounded once, of equal bits wherever a number
    stands."""
    wide = widen(x)
    y = 2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (wide * sigmoid(y)).to(x.dtype)


def relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)^2"""
    return x.relu().square()


PLAIN_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": gelu_tanh,
    "relu_squared": relu_squared,
}
