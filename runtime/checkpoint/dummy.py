"""Random weights of the right shapes (`--load-format dummy`): benchmarks without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.ops import Weight
from .weight_source import stacked_shape

_STD = 0.02  # Llama's initializer_range


class DummyWeights:
    """A `WeightSource` of normal numbers from a fixed seed; norms are 1, so logits are finite.

    They are made on the device, in the dtype: nothing is copied. Other devices make others.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        values = torch.empty(tuple(shape), dtype=dtype or self.dtype, device=self.device)
        return values.normal_(std=_STD, generator=self._generator)

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self.take(names[0], stacked_shape(shapes))

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        return self.take_stacked(
            [f"{name}.weight" for name in names], [(size, in_features) for size in out_features]
        )

    def tie_weight(self, table: Tensor) -> Weight:
        return table

    def skip(self, name: str) -> None:
        """Nothing is kept, so nothing is skipped."""

    def finish(self) -> None:
        """Nothing is left over."""
