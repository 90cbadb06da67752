"""Products with a weight that has an input order, by kernels that do not support one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from .ops import Linear, OutputLinear
from .quantized_tensors import QuantizedWeight
from .reference.dense import placed


def over_ordered_inputs(
    weight: QuantizedWeight, make: Callable[[QuantizedWeight], Linear]
) -> OutputLinear:
    """`make`'s product of a weight with an `input_order`, which costs a copy of its input."""
    order = weight.input_order
    assert order is not None, "inputs in order need no copy"
    run = make(replace(weight, input_order=None))

    def linear(x: Tensor, out: Tensor | None = None) -> Tensor:
        return placed(run(x.index_select(-1, order)), out)

    return linear
