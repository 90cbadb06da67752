"""The tensors and linear modules that a model requests while it is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.ops import Weight
from ...kernels.registry import select_kernels
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.weight_source import ModelTensors, WeightSource, stacked_shape
from .language_model import build_model
from .layers.build import ModelBuild


def model_tensors(config: ModelConfig) -> ModelTensors:
    """Reads nothing and takes no memory for weights."""
    source = _Names()
    kernels = select_kernels(torch.float32, "cpu", "reference")
    device = torch.device("meta")
    build = ModelBuild(config, source, kernels, torch.float32, device, max_model_len=1)
    build_model(build)
    return ModelTensors(source.shapes, source.linears)


class _Names(WeightSource):
    """A `WeightSource` of tensors without contents that records what is requested."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.linears: dict[str, tuple[int, int]] = {}

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        self.shapes[name] = tuple(shape)
        return torch.empty(tuple(shape), dtype=dtype or torch.float32, device="meta")

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        self.shapes.update(zip(names, map(tuple, shapes), strict=True))
        return torch.empty(stacked_shape(shapes), device="meta")

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        for name, size in zip(names, out_features, strict=True):
            self.shapes[f"{name}.weight"] = self.linears[name] = (size, in_features)
        return torch.empty(sum(out_features), in_features, device="meta")

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        self.shapes[name] = (num_experts, in_features, out_features)
        return torch.empty(num_experts, out_features, in_features, device="meta")

    def tie_weight(self, table: Tensor) -> Weight:
        return table

    def skip(self, name: str) -> None:
        pass

    def finish(self) -> None:
        pass
