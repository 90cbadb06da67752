"""Linear layers by checkpoint name; modules that share their input are computed as one product.

Where the engine serves adapters, each adapter's product is added to the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ....kernels.ops import Activation, Lora
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
    ) -> None:
        """`out_features[i]` belongs to `names[i]`. Tensor parallelism would split at the boundaries
        of stacked parts."""
        weight = build.source.take_weight(names, out_features, in_features)
        self._run = build.kernels.make_linear(weight, _bias(build, names, out_features, bias))
        self._lora: Lora | None = None
        if build.adapters is not None:
            self._lora = build.adapters.beside(names, in_features, out_features)

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
