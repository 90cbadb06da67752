"""Linear layers by checkpoint name; modules that share their input are computed as one product.

Where the engine serves adapters, each adapter's product is added to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....kernels.ops import Activation, Lora, NormedLinear, Weight
from ...checkpoint.parts import WHOLE, Part, Range, Rows, num_rows
from ..forward_batch import ForwardBatch
from .build import ModelBuild
from .ranks import ALONE

MakeNormed = Callable[[Tensor, float], NormedLinear | None]
"""From a norm's weight and epsilon, see `ops.MakeNormedLinear`."""


class LinearLayer:
    """One product for the modules `names`, whose outputs are concatenated in this order."""

    def __init__(
        self,
        build: ModelBuild,
        names: Sequence[str],
        *,
        in_features: int,
        out_features: Sequence[int],
        bias: bool = False,
        orders: Sequence[Tensor | None] | None = None,
        part: Part = WHOLE,
        is_summed: bool = True,
    ) -> None:
        """`out_features[i]` belongs to `names[i]`, so does `orders[i]`, int64: which of the outputs
        that this rank has of the module each of its outputs here is; None: as in the checkpoint.

        part: what this rank has of the product. Where that is a part of the inputs, the results are
        summed over the ranks, unless `is_summed` says that the caller does it.
        """
        is_partial = part.inputs is not None
        outputs = _sizes(out_features, part)
        weight = build.source.take_part(names, out_features, in_features, part)
        stacked_bias = None
        if bias and is_partial and build.ranks.rank:  # of partial results one rank's has it
            build.source.skip(f"{names[0]}.bias")
        elif bias:
            stacked_bias = _bias(build, names, out_features, part)
        if orders is not None:
            order = _stacked_order(orders, outputs)
            weight = _ordered(weight, order)
            stacked_bias = None if stacked_bias is None else stacked_bias[order]
        self._run = build.kernels.make_linear(weight, stacked_bias)
        self.make_normed = _normed_maker(build, weight, stacked_bias)
        self._ranks = build.ranks if is_partial and is_summed else ALONE
        self._lora: Lora | None = None
        if build.adapters is not None:
            self._lora = build.adapters.beside(names, in_features, out_features, orders, part)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, in_features] -> [T, sum of out_features]; or this rank's part of either."""
        y = self._run(x)
        if self._lora is not None and batch.adapters is not None:
            self._lora(x.contiguous(), y, batch.adapters)
        return self._ranks.sum(y)


class GatedLinearLayer:
    """activation(gate(x)) * up(x), in one product; adapters are added before the activation."""

    def __init__(
        self,
        build: ModelBuild,
        names: Sequence[str],
        *,
        in_features: int,
        size: int,
        activation: Activation = "silu",
        bias: bool = False,
        share: Range | None = None,
    ) -> None:
        """names: the gate and up modules, or one module with both, gates first. share: the gates,
        and ups, that this rank has; None: all `size`."""
        self._run: Callable[[Tensor, ForwardBatch], Tensor]
        kernels, out_features = build.kernels, [2 * size // len(names)] * len(names)
        part = WHOLE if share is None else Part(_gated_rows(len(names), size, share))
        weight = build.source.take_part(names, out_features, in_features, part)
        stacked_bias = _bias(build, names, out_features, part) if bias else None
        self.make_normed = _normed_maker(build, weight, stacked_bias, activation)
        if build.adapters is None:
            run = kernels.make_gated_linear(weight, stacked_bias, activation)
            self._run = lambda x, batch: run(x)
            return
        lora = build.adapters.beside(names, in_features, out_features, part=part)
        adapted = kernels.make_gated_linear_with_lora(weight, stacked_bias, activation, lora)
        self._run = lambda x, batch: adapted(x, batch.adapters)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, in_features] -> [T, size], or this rank's part of that."""
        return self._run(x, batch)


def _normed_maker(
    build: ModelBuild, weight: Weight, bias: Tensor | None, activation: Activation | None = None
) -> MakeNormed:
    """Of the same layer behind a norm. Where there is none the weight is not held."""
    make = build.kernels.make_normed_linear
    if make is None:
        return lambda norm_weight, eps: None
    return lambda norm_weight, eps: make(weight, bias, norm_weight, eps, activation)


def _gated_rows(num_modules: int, size: int, share: Range) -> list[Rows]:
    """The outputs of each module."""
    if num_modules == 2:
        return [[share], [share]]
    first, end = share
    return [[share, (size + first, size + end)]]


def _sizes(out_features: Sequence[int], part: Part) -> Sequence[int]:
    """How many outputs of each module the part has."""
    return out_features if part.outputs is None else [num_rows(rows) for rows in part.outputs]


def _bias(
    build: ModelBuild, names: Sequence[str], out_features: Sequence[int], part: Part
) -> Tensor:
    full_names = [f"{name}.bias" for name in names]
    if part.outputs is None:
        return build.source.take_stacked(full_names, [(size,) for size in out_features])
    owns = zip(full_names, out_features, part.outputs, strict=True)
    return torch.cat([build.source.take_rows(name, (size,), rows) for name, size, rows in owns])


def _stacked_order(orders: Sequence[Tensor | None], out_features: Sequence[int]) -> Tensor:
    """The order of the concatenated outputs."""
    parts, first = [], 0
    for order, size in zip(orders, out_features, strict=True):
        parts.append(first + (torch.arange(size) if order is None else order))
        first += size
    return torch.cat(parts)


def _ordered(weight: Weight, order: Tensor) -> Weight:
    """The weight with its outputs in this order; a copy."""
    if isinstance(weight, Tensor):
        return weight[order]
    offsets = None if weight.offsets is None else weight.offsets[order]
    return replace(
        weight, values=weight.values[order], scales=weight.scales[order], offsets=offsets
    )
