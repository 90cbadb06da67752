"""A model's tensors, one at a time, as the model requests them by name.

A model takes its tensors while it is built (`take`, `take_stacked`), so only one is in memory twice
at any time; at the end `finish` reports tensors that nobody requested. Sources: `checkpoint`
safetensors, `gguf` its own files, `dummy` random numbers; `packed` wraps a quantized checkpoint,
and `quantizing` rounds the floating weights of any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import Weight
from .parts import Part, Rows
from .weight_parts import part_of, rows_of


class WeightSource(Protocol):
    """Tensors by checkpoint name, in the dtype and on the device the source was opened for.

    Where several processes hold a model together, each takes parts. A source that says no more
    about it reads the whole for that.
    """

    def __contains__(self, name: str) -> bool:
        """Whether `take` would find a tensor of this name; also False if the source makes any."""
        ...

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, owned by the caller, in `dtype` if given. Raises ModelLoadError if missing or
        misshapen."""
        ...

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        """Several tensors stacked along their first axis (fused qkv, gate and up)."""
        ...

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        """The weight of one linear layer made of the modules `names` (without ".weight"), with
        concatenated outputs; quantized if the source has it so."""
        ...

    def take_rows(
        self, name: str, shape: Sequence[int], rows: Rows | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """These rows of what `take` returns."""
        return rows_of(self.take(name, shape, dtype), rows)

    def take_part(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, part: Part
    ) -> Weight:
        """This part of what `take_weight` returns. Raises ModelLoadError where it would cut a group
        of numbers that share a scale."""
        return part_of(
            names, self.take_weight(names, out_features, in_features), out_features, part
        )

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        """[num_experts, out_features, in_features]: the weights of all experts of a layer, which
        the checkpoint has as one tensor `name` [num_experts, in_features, out_features]; quantized
        if the source has it so."""
        ...

    def tie_weight(self, table: Tensor) -> Weight:
        """The output projection's weight if it is the embedding, `table` [vocab_size, hidden_size],
        as returned by `take`."""
        ...

    def skip(self, name: str) -> None:
        """Declare that the tensor, if it exists, is not needed; a name that ends with "." stands
        for all tensors within that module."""
        ...

    def finish(self) -> None:
        """Called after the model is built: warns about tensors that were never requested."""
        ...


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors that a model takes from its source."""

    shapes: Mapping[str, tuple[int, ...]]  # of all tensors
    linears: Mapping[str, tuple[int, int]]  # (out_features, in_features) of modules


def stacked_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of tensors of these shapes stacked along the first axis."""
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def empty_stack(
    shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """An uninitialised stack and its parts as views."""
    stack = torch.empty(stacked_shape(shapes), dtype=dtype, device=device)
    return stack, list(torch.split(stack, [shape[0] for shape in shapes]))
