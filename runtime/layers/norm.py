"""RMSNorm with its weight."""

from __future__ import annotations

from torch import Tensor

from ...kernels.registry import Kernels
from ..weights.source import WeightSource


class RMSNorm:
    """x / rms(x) * weight; with a residual, adds x to it in place first."""

    def __init__(
        self, source: WeightSource, name: str, size: int, eps: float, kernels: Kernels
    ) -> None:
        self._run = kernels.make_rms_norm(source.take(f"{name}.weight", (size,)), eps)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]; `residual` [T, size] becomes residual + x."""
        return self._run(x, residual)
