"""Linear layers by checkpoint name; modules that share their input are computed as one product.

Where the engine serves adapters, each adapter's product is added to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ....kernels.ops import Activation, Lora, Weight
from ..forward_batch import ForwardBatch
from .build import ModelBuild


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
    ) -> None:
        """`out_features[i]` belongs to `names[i]`, so does `orders[i]` [out_features[i]] int64:
        which of the module's outputs each of its outputs here is; None: as in the checkpoint.

        Tensor parallelism would split at the boundaries of stacked parts.
        """
        weight = build.source.take_weight(names, out_features, in_features)
        stacked_bias = _bias(build, names, out_features, bias)
        if orders is not None:
            order = _stacked_order(orders, out_features)
            weight = _ordered(weight, order)
            stacked_bias = None if stacked_bias is None else stacked_bias[order]
        self._run = build.kernels.make_linear(weight, stacked_bias)
        self._lora: Lora | None = None
        if build.adapters is not None:
            self._lora = build.adapters.beside(names, in_features, out_features, orders)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, in_features] -> [T, sum of out_features]."""
        y = self._run(x)
        if self._lora is not None and batch.adapters is not None:
            self._lora(x.contiguous(), y, batch.adapters)
        return y


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
    ) -> None:
        """names: the gate and up modules, or one module with both, gates first."""
        self._run: Callable[[Tensor, ForwardBatch], Tensor]
        kernels, out_features = build.kernels, [2 * size // len(names)] * len(names)
        weight = build.source.take_weight(names, out_features, in_features)
        stacked_bias = _bias(build, names, out_features, bias)
        if build.adapters is None:
            run = kernels.make_gated_linear(weight, stacked_bias, activation)
            self._run = lambda x, batch: run(x)
            return
        lora = build.adapters.beside(names, in_features, out_features)
        adapted = kernels.make_gated_linear_with_lora(weight, stacked_bias, activation, lora)
        self._run = lambda x, batch: adapted(x, batch.adapters)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, in_features] -> [T, size]."""
        return self._run(x, batch)


def _bias(
    build: ModelBuild, names: Sequence[str], out_features: Sequence[int], has_bias: bool
) -> Tensor | None:
    if not has_bias:
        return None
    return build.source.take_stacked(
        [f"{name}.bias" for name in names], [(size,) for size in out_features]
    )


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
