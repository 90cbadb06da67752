"""The part that a rank takes of a weight that has been read as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import ModelLoadError
from ...kernels.ops import Weight
from .parts import Part, Rows


def rows_of(tensor: Tensor, rows: Rows | None) -> Tensor:
    """These rows of a tensor; a copy unless it is all of them."""
    if rows is None:
        return tensor
    return torch.cat([tensor[first:end] for first, end in rows])


def part_of(
    names: Sequence[str], weight: Weight, out_features: Sequence[int], part: Part
) -> Weight:
    """The part of a weight with the modules' outputs one after the other, or with one more axis of
    experts in front; a copy unless it is the whole.

    Raises ModelLoadError where it would cut a group of numbers that share a scale.
    """
    if part.outputs is not None:
        starts = [sum(out_features[:nth]) for nth in range(len(out_features))]
        rows = [
            (start + first, start + end)
            for start, own in zip(starts, part.outputs, strict=True)
            for first, end in own
        ]
        weight = _with_outputs(weight, rows)
    return weight if part.inputs is None else _with_inputs(names, weight, *part.inputs)


def _with_outputs(weight: Weight, rows: Rows) -> Weight:
    def of(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[..., first:end, :] for first, end in rows], dim=-2)

    if isinstance(weight, Tensor):
        return of(weight)
    return replace(
        weight,
        values=of(weight.values),
        scales=of(weight.scales),
        offsets=None if weight.offsets is None else of(weight.offsets),
    )


def _with_inputs(names: Sequence[str], weight: Weight, first: int, end: int) -> Weight:
    if isinstance(weight, Tensor):
        return weight[..., first:end].contiguous()
    shown = " and ".join(names)
    if weight.input_order is not None:
        raise ModelLoadError(
            f"{shown}: inputs in an order of their own (act-order) cannot be divided between "
            "ranks; use tp_size=1"
        )
    size = weight.group_size
    is_one_group = size == weight.in_features
    if not is_one_group and (first % size or end % size):
        raise ModelLoadError(
            f"{shown}: a rank's inputs {first} to {end} would cut a group of {size} that share a "
            "scale; use another tp_size"
        )

    def of_groups(tensor: Tensor) -> Tensor:
        return tensor if is_one_group else tensor[..., first // size : end // size].contiguous()

    each = 8 // weight.bits  # numbers a byte
    return replace(
        weight,
        group_size=end - first if is_one_group else size,
        values=weight.values[..., first // each : end // each].contiguous(),
        scales=of_groups(weight.scales),
        offsets=None if weight.offsets is None else of_groups(weight.offsets),
    )
