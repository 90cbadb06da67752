"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up as one product."""

from __future__ import annotations

from torch import Tensor

from ...kernels.registry import Kernels
from ..model_config import ModelConfig
from ..weights.source import WeightSource
from .linear import load_linear


class GatedMLP:
    """SwiGLU."""

    def __init__(
        self, source: WeightSource, name: str, config: ModelConfig, kernels: Kernels
    ) -> None:
        self._gate_up = load_linear(
            source,
            kernels.make_gated_linear,
            [f"{name}.gate_proj", f"{name}.up_proj"],
            in_features=config.hidden_size,
            out_features=[config.intermediate_size] * 2,
            bias=config.mlp_bias,
        )
        self._down = load_linear(
            source,
            kernels.make_linear,
            [f"{name}.down_proj"],
            in_features=config.intermediate_size,
            out_features=[config.hidden_size],
            bias=config.mlp_bias,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        return self._down(self._gate_up(x))
