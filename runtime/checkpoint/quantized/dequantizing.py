"""Floating weights that a checkpoint stores in fewer bits (8-bit floats, bitsandbytes' NF4):
dequantized while they are loaded, so that a model takes as much memory as one in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ....kernels.ops import Weight
from ..safetensors.checkpoint import CheckpointWeights
from ..weight_source import WeightSource, empty_stack


class FloatFormat(Protocol):
    """How such weights are stored."""

    def is_packed(self, source: CheckpointWeights, name: str) -> bool:
        """Whether the tensor `name` (with ".weight") is stored so; else it is plain."""
        ...

    def require(self, source: CheckpointWeights, name: str, shape: Sequence[int]) -> None:
        """Raises ModelLoadError unless the packed tensor `name` stands for one of this shape."""
        ...

    def read_into(self, source: CheckpointWeights, name: str, target: Tensor) -> None:
        """target: of the weight's shape, rounded to once."""
        ...

    def beside(self, name: str) -> Iterable[str]:
        """The tensors that belong to the packed tensor `name`."""
        ...


class DequantizingWeights(WeightSource):
    """A `WeightSource` over a checkpoint with such weights; tensors of other types pass unchanged,
    whatever their modules' names: a tensor's type alone says how it is read."""

    def __init__(
        self, source: CheckpointWeights, form: FloatFormat, *, has_stored_weights: bool = False
    ) -> None:
        """has_stored_weights: `take_weight` returns dequantized weights in float32, for callers
        that round them further."""
        self._source = source
        self._form = form
        self._has_stored_weights = has_stored_weights

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if not self._is_packed(name):
            return self._source.take(name, shape, dtype)
        self._form.require(self._source, name, shape)  # before room is made for it
        target = torch.empty(
            tuple(shape), dtype=dtype or self._source.dtype, device=self._source.device
        )
        self._form.read_into(self._source, name, target)
        return target

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self._stacked(names, shapes, self._source.dtype)

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        full_names = [f"{name}.weight" for name in names]
        if not any(map(self._is_packed, full_names)):
            return self._source.take_weight(names, out_features, in_features)
        shapes = [(size, in_features) for size in out_features]
        dtype = torch.float32 if self._has_stored_weights else self._source.dtype
        return self._stacked(full_names, shapes, dtype)

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        """Experts of one tensor are floating in all checkpoints that are known."""
        return self._source.take_experts(name, num_experts, out_features, in_features)

    def tie_weight(self, table: Tensor) -> Weight:
        return self._source.tie_weight(table)

    def skip(self, name: str) -> None:
        for each in (name, *self._form.beside(name)):
            self._source.skip(each)

    def finish(self) -> None:
        self._source.finish()

    def _stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor:
        if not any(map(self._is_packed, names)):
            return self._source.take_stacked(names, shapes)
        for name, shape in zip(names, shapes, strict=True):
            if self._is_packed(name):
                self._form.require(self._source, name, shape)
            else:
                self._source.require(name, shape)
        stack, parts = empty_stack(shapes, dtype, self._source.device)
        for name, part in zip(names, parts, strict=True):
            if self._is_packed(name):
                self._form.read_into(self._source, name, part)
            else:
                part.copy_(self._source.take(name, part.shape, dtype))
        return stack

    def _is_packed(self, name: str) -> bool:
        return name in self._source and self._form.is_packed(self._source, name)
