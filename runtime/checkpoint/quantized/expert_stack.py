"""Stacks the weights of one layer's experts, in one format, as `ops.MakeExperts` takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.ops import Weight


def stacked_weights(parts: Iterable[Weight], count: int) -> Weight:
    """`count` weights of one shape, stacked on a new first axis; a part is freed once copied.

    Raises:
        ModelLoadError: they are quantized in different formats.
    """
    stack: Weight | None = None
    for index, part in enumerate(parts):
        if stack is None:
            stack = _empty_stack(part, count)
        stack, part = _both_ordered(stack, part)
        _put(stack, index, part)
    assert stack is not None, "there is at least one expert"
    return stack


def _empty_stack(part: Weight, count: int) -> Weight:
    def empty(tensor: Tensor) -> Tensor:
        return tensor.new_empty((count, *tensor.shape))

    if isinstance(part, Tensor):
        return empty(part)
    return part.map(empty)


def _both_ordered(stack: Weight, part: Weight) -> tuple[Weight, Weight]:
    """Gives both an order of inputs where one has it. An expert's inputs may be in order by chance,
    for example where no calibration data reached the expert."""
    if isinstance(stack, Tensor) or isinstance(part, Tensor):
        return stack, part
    if (stack.input_order is None) is (part.input_order is None):
        return stack, part
    order = torch.arange(part.in_features, dtype=torch.int32, device=part.values.device)
    if part.input_order is None:
        return stack, replace(part, input_order=order)
    return replace(stack, input_order=order.repeat(len(stack.values), 1)), part


def _put(stack: Weight, index: int, part: Weight) -> None:
    if _format(stack) != _format(part):
        raise ModelLoadError(
            f"experts of one layer are quantized in differing formats: {_format(stack)} and, of "
            f"expert {index}, {_format(part)}"
        )
    for whole, own in zip(_tensors(stack), _tensors(part), strict=True):
        whole[index] = own


def _format(weight: Weight) -> tuple[object, ...]:
    """What must be equal within a stack, besides shapes."""
    if isinstance(weight, Tensor):
        return ("plain",)
    has_offsets = weight.offsets is not None
    return (weight.bits, weight.codes, weight.group_size, has_offsets, weight.activations)


def _tensors(weight: Weight) -> Sequence[Tensor]:
    return (weight,) if isinstance(weight, Tensor) else weight.tensors()
