"""Weights in 8-bit floats with scales, as DeepSeek-V3 and others are published: floating weights
that take half the room in a file, dequantized while they are loaded.

    NAME.weight            [outputs, inputs] float8 (E4M3)
    NAME.weight_scale_inv  [ceil(outputs / rows), ceil(inputs / columns)], one for each block of
                           that many rows and columns, or a single one for the whole weight

    weight = scale * number, in float32, rounded once

The name's "inv" is of the quantizer, which multiplied by its inverse. Scales of inputs
(`activation_scale`) are not used: products take their inputs as they are.

Source: DeepSeek-V3's weight_dequant (github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.ops import Weight
from ..safetensors.checkpoint import CheckpointWeights
from ..weight_source import WeightSource, empty_stack

_UNUSED = ("activation_scale", "input_scale")
_CHUNK_NUMBERS = 1 << 21  # of a weight at a time, in float32; a guess
_CHUNK_ROWS = 128

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""


class Fp8Weights(WeightSource):
    """A `WeightSource` over a checkpoint with such weights; tensors of other types pass unchanged,
    whatever their modules' names: a tensor's type alone says how it is read."""

    def __init__(
        self, source: CheckpointWeights, block: Block | None, *, has_stored_weights: bool = False
    ) -> None:
        """block: None: a scale for each whole weight; has_stored_weights: `take_weight` returns
        dequantized weights in float32, for callers that round them further."""
        self._source = source
        self._block = block
        self._has_stored_weights = has_stored_weights

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        if not self._is_packed(name):
            return self._source.take(name, shape, dtype)
        target = self._empty(shape, dtype or self._source.dtype)
        self._read_into(name, target)
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
        self._source.skip(name)
        self._source.skip(f"{name}_scale_inv")

    def finish(self) -> None:
        self._source.finish()

    def _stacked(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> Tensor:
        if not any(map(self._is_packed, names)):
            return self._source.take_stacked(names, shapes)
        for name, shape in zip(names, shapes, strict=True):
            self._require(name, shape)
        stack, parts = empty_stack(shapes, dtype, self._source.device)
        for name, part in zip(names, parts, strict=True):
            if self._is_packed(name):
                self._read_into(name, part)
            else:
                part.copy_(self._source.take(name, part.shape, dtype))
        return stack

    def _is_packed(self, name: str) -> bool:
        return name in self._source and self._source.dtype_of(name) is torch.float8_e4m3fn

    def _require(self, name: str, shape: Sequence[int]) -> None:
        """Before room is made for it."""
        if not self._is_packed(name):
            self._source.require(name, shape)
        elif self._source.shape(name) != tuple(shape):
            found = f"{list(self._source.shape(name))}"
            raise self._fail(name, f"shape {list(shape)}", found)

    def _read_into(self, name: str, target: Tensor) -> None:
        """target: of the weight's shape."""
        self._require(name, target.shape)
        scales = self._scales(f"{name}_scale_inv", target.shape)
        numbers = self._source.read(name)
        rows, columns = self._block or (_CHUNK_ROWS, numbers.shape[1])
        if self._block is None:
            scales = scales.expand(-(-len(numbers) // rows), 1)
        step = max(1, _CHUNK_NUMBERS // (rows * numbers.shape[1])) * rows
        for first in range(0, len(numbers), step):
            part = slice(first, first + step)
            wide = numbers[part].to(torch.float32)
            own = scales[first // rows : -(-(first + len(wide)) // rows)]
            own = own.repeat_interleave(rows, 0)[: len(wide)]
            target[part] = wide.mul_(own.repeat_interleave(columns, 1)[:, : wide.shape[1]])
        for unused in _UNUSED:
            self._source.skip(f"{name.removesuffix('.weight')}.{unused}")

    def _scales(self, name: str, shape: Sequence[int]) -> Tensor:
        """[blocks of rows, blocks of columns] float32."""
        scales = self._source.read(name)
        if not scales.dtype.is_floating_point:
            raise self._fail(name, "floating point", str(scales.dtype))
        blocks = [1, 1]
        if self._block is not None:
            blocks = [-(-size // part) for size, part in zip(shape, self._block, strict=True)]
        is_single = self._block is None and scales.numel() == 1
        if not is_single and list(scales.shape) != blocks:
            raise self._fail(name, f"a scale for each of {blocks} blocks", f"{list(scales.shape)}")
        return scales.float().view(*blocks)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self._source.device)

    def _fail(self, name: str, expected: str, found: str) -> ModelLoadError:
        folder = self._source.folder
        return ModelLoadError(f"{folder}: tensor {name!r}: expected {expected}, found {found}")
