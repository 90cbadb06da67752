"""Quantizes a model's linears while it is loaded (`--quantization`), one at a time.

The embedding, norms, biases and the routers of mixtures of experts are not changed, nor are linears
whose inputs are no multiple of 32 and those that are never one product. The output projection gets
8 bits, whatever the others have: it is a large part of a small model, and its errors go straight
into the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.ops import Weight
from ....kernels.quantized_tensors import QuantizedWeight
from ..parts import Part, Rows
from ..weight_source import WeightSource
from .expert_stack import stacked_weights
from .rounding import MAX_GROUP_SIZE, group_size_for, round_to_4_bits, round_to_8_bits

Quantization = Literal["int8", "w8a8", "int4"]
# By the last part of a module's name. Routers are small, and their choice is no sum that averages
# errors, nor is an indexer's, of weights of heads; latent attention splits kv_b_proj and multiplies
# with its parts directly.
_KEPT = ("gate", "router", "shared_expert_gate", "kv_b_proj", "weights_proj")
_OUTPUT_NAME = "lm_head"


def bits_for(names: Sequence[str], in_features: int, quantization: Quantization) -> int | None:
    """The bits of a linear made of the modules `names`; None: it is not quantized."""
    if any(name.rpartition(".")[2] in _KEPT for name in names):
        return None
    if group_size_for(in_features) is None:
        return None
    return 4 if quantization == "int4" and not is_output(names) else 8


def is_output(names: Sequence[str]) -> bool:
    """Whether the modules `names` are the output projection."""
    return [name.rpartition(".")[2] for name in names] == [_OUTPUT_NAME]


class QuantizingWeights(WeightSource):
    """A `WeightSource` that rounds the floating weights of another (see `rounding`)."""

    def __init__(
        self,
        source: WeightSource,
        quantization: Quantization,
        dtype: torch.dtype,
        group_size: int = MAX_GROUP_SIZE,
    ) -> None:
        """dtype: of what is not rounded; `source` may return weights in a wider one. group_size:
        upper limit for 4 bits."""
        self._source = source
        self._quantization = quantization
        self._dtype = dtype
        self._group_size = group_size

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self._source.take(name, shape, dtype)

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self._source.take_stacked(names, shapes)

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        weight = self._source.take_weight(names, out_features, in_features)
        return weight if isinstance(weight, QuantizedWeight) else self.rounded(names, weight)

    def take_part(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, part: Part
    ) -> Weight:
        if part.inputs is not None:  # a row may have one scale, which takes the whole of it
            return super().take_part(names, out_features, in_features, part)
        weight = self._source.take_part(names, out_features, in_features, part)
        return weight if isinstance(weight, QuantizedWeight) else self.rounded(names, weight)

    def take_rows(
        self, name: str, shape: Sequence[int], rows: Rows | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        return self._source.take_rows(name, shape, rows, dtype)

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        weight = self._source.take_experts(name, num_experts, out_features, in_features)
        if isinstance(weight, QuantizedWeight):
            return weight
        return stacked_weights((self.rounded([name], each) for each in weight), num_experts)

    def tie_weight(self, table: Tensor) -> Weight:
        weight = self._source.tie_weight(table)
        if isinstance(weight, QuantizedWeight):
            return weight
        return self.rounded([_OUTPUT_NAME], weight)

    def skip(self, name: str) -> None:
        self._source.skip(name)

    def finish(self) -> None:
        self._source.finish()

    def rounded(self, names: Sequence[str], weight: Tensor) -> Weight:
        """The weight of the modules `names` as `take_weight` gives it."""
        in_features = weight.shape[1]
        bits = bits_for(names, in_features, self._quantization)
        group_size = group_size_for(in_features, self._group_size)
        if bits is None or group_size is None:
            return weight.to(self._dtype)
        if bits == 4:
            quantized = round_to_4_bits(weight, group_size)
        else:
            rounds = self._quantization == "w8a8" and not is_output(names)
            quantized = round_to_8_bits(weight, "int8" if rounds else "exact")
        if not bool(quantized.scales.isfinite().all()):
            shown = " and ".join(names)
            raise ModelLoadError(f"{shown}: a weight is not finite, or too large to quantize")
        return quantized
