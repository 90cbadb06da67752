"""Where a model's tensors come from, one at a time, as the model asks for them by name.

A model pulls its tensors while it is built (`take`, `take_stacked`), so only one is held twice at
any time; at the end `finish` reports what nobody asked for. Sources: `checkpoint` safetensors,
`gguf` its own files, `dummy` random numbers; `packed` wraps a checkpoint that is quantized, and
`quantizing` rounds what any of them has floating.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import Weight


class WeightSource(Protocol):
    """Tensors by checkpoint name, in the dtype and on the device the source was opened for."""

    def __contains__(self, name: str) -> bool:
        """Whether `take` would find a tensor of this name; False too where it makes any."""
        ...

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, owned by the caller; dtype: instead of the source's. Raises ModelLoadError if
        missing or misshapen."""
        ...

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        """Several tensors stacked along their first axis (fused qkv, gate and up)."""
        ...

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        """The weight of one linear layer made of the modules `names` (without ".weight"), whose
        outputs follow each other; quantized where the source has it so."""
        ...

    def tie_weight(self, table: Tensor) -> Weight:
        """The output projection's weight where it is the embedding, `table` [vocab_size,
        hidden_size], as `take` gave it."""
        ...

    def skip(self, name: str) -> None:
        """Declare that the tensor, should it exist, is rightly not taken; a name that ends in "."
        stands for all within that module."""
        ...

    def finish(self) -> None:
        """Called once the model is built: warns about tensors that were never asked for."""
        ...


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """What a model takes from its source."""

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
