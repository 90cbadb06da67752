"""Linear layers by checkpoint name, several stacked into one where they share their input."""

from __future__ import annotations

from collections.abc import Sequence

from ...kernels.ops import Linear, MakeGatedLinear, MakeLinear
from ..weights.source import WeightSource


def load_linear(
    source: WeightSource,
    make: MakeLinear | MakeGatedLinear,
    names: Sequence[str],
    *,
    in_features: int,
    out_features: Sequence[int],
    bias: bool = False,
) -> Linear:
    """One linear layer made of `names`, whose outputs follow each other in this order.

    `out_features[i]` belongs to `names[i]`. Stacked parts are where tensor parallelism will cut.
    """
    weight = source.take_stacked(
        [f"{name}.weight" for name in names], [(size, in_features) for size in out_features]
    )
    if not bias:
        return make(weight, None)
    stacked_bias = source.take_stacked(
        [f"{name}.bias" for name in names], [(size,) for size in out_features]
    )
    return make(weight, stacked_bias)
