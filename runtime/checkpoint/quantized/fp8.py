"""Weights in 8-bit floats with scales, as DeepSeek-V3, llm-compressor and others publish them:

    NAME.weight            [outputs, inputs] float8 (E4M3)
    NAME.weight_scale_inv  [ceil(outputs / rows), ceil(inputs / columns)], one for each block of
    or NAME.weight_scale   that many rows and columns; without blocks one for the whole weight or
                           one for each row

    weight = scale * number, in float32, rounded once

"inv" is of DeepSeek's quantizer, which multiplied by its inverse. Scales are floating, or uint8:
exponents of powers of two with a bias of 127 (E8M0, of MXFP8). Those of inputs are not used:
products take their inputs as they are.

Sources: DeepSeek-V3's weight_dequant (github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py);
compressed-tensors' `float-quantized`; OCP Microscaling Formats, 5.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ..safetensors.checkpoint import CheckpointWeights
from .e8m0 import powers_of_two

_UNUSED = ("activation_scale", "input_scale", "input_scale_ub")
_CHUNK_NUMBERS = 1 << 21  # of a weight at a time, in float32; a guess
_CHUNK_ROWS = 128

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """A `FloatFormat`."""

    block: Block | None  # None: a scale for each whole weight, or for each of its rows
    scales: str  # the tensor's last name

    def is_packed(self, source: CheckpointWeights, name: str) -> bool:
        return source.dtype_of(name) is torch.float8_e4m3fn

    def require(self, source: CheckpointWeights, name: str, shape: Sequence[int]) -> None:
        if source.shape(name) != tuple(shape):
            raise _fail(source, name, f"shape {list(shape)}", f"{list(source.shape(name))}")

    def beside(self, name: str) -> Iterable[str]:
        module = name.removesuffix(".weight")
        return [f"{module}.{own}" for own in (self.scales, *_UNUSED)]

    def read_into(self, source: CheckpointWeights, name: str, target: Tensor) -> None:
        scales, *unused = self.beside(name)
        block, by_block = self._scales(source, scales, target.shape)
        numbers = source.read(name)
        rows, columns = block
        step = max(1, _CHUNK_NUMBERS // (rows * numbers.shape[1])) * rows
        for first in range(0, len(numbers), step):
            part = slice(first, first + step)
            wide = numbers[part].to(torch.float32)
            own = by_block[first // rows : -(-(first + len(wide)) // rows)]
            own = own.repeat_interleave(rows, 0)[: len(wide)]
            target[part] = wide.mul_(own.repeat_interleave(columns, 1)[:, : wide.shape[1]])
        for each in unused:
            source.skip(each)

    def _scales(
        self, source: CheckpointWeights, name: str, shape: Sequence[int]
    ) -> tuple[Block, Tensor]:
        """Scales [blocks of rows, blocks of columns] float32, and the blocks."""
        stored = source.read(name)
        scales = powers_of_two(stored) if stored.dtype is torch.uint8 else stored
        if not scales.dtype.is_floating_point:
            raise _fail(source, name, "floating point", str(scales.dtype))
        num_outputs, num_inputs = shape
        if self.block is None:
            if scales.numel() == 1:
                one = scales.float().view(1, 1).expand(-(-num_outputs // _CHUNK_ROWS), 1)
                return (_CHUNK_ROWS, num_inputs), one
            if scales.numel() == num_outputs:
                return (1, num_inputs), scales.float().view(-1, 1)
            expected = f"a scale, or one for each of {num_outputs} rows"
            raise _fail(source, name, expected, f"{list(scales.shape)}")
        blocks = [-(-size // part) for size, part in zip(shape, self.block, strict=True)]
        if list(scales.shape) != blocks:
            raise _fail(
                source, name, f"a scale for each of {blocks} blocks", f"{list(scales.shape)}"
            )
        return self.block, scales.float()


def _fail(source: CheckpointWeights, name: str, expected: str, found: str) -> ModelLoadError:
    return ModelLoadError(f"{source.folder}: tensor {name!r}: expected {expected}, found {found}")
