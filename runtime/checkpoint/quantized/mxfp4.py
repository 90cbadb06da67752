"""Experts in MXFP4, as gpt-oss is published: passed on as they are, 4 bits a number.

    NAME_blocks  [experts, outputs, inputs / 32, 16] uint8, two codes of floats (E2M1) a byte, that
                 of an even input in the low half
    NAME_scales  [experts, outputs, inputs / 32] uint8, powers of two with a bias of 127 (E8M0)

Source: OCP Microscaling Formats, 5.2 to 5.4. A power of two is exact in bfloat16; scales are
halved, since the numbers of a `QuantizedWeight` are twice the floats.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.quantized_tensors import QuantizedWeight
from ..safetensors.checkpoint import CheckpointWeights
from .e8m0 import powers_of_two
from .quantization_config import GROUP_SIZE


def has_mxfp4(source: CheckpointWeights, name: str) -> bool:
    """Whether the tensor `name` is stored in this form."""
    return f"{name}_blocks" in source


def read_mxfp4(
    source: CheckpointWeights, name: str, shape: tuple[int, int, int]
) -> QuantizedWeight:
    """shape: (experts, outputs, inputs). On the CPU.

    Raises ModelLoadError for tensors of another shape or type, and for scales that are no numbers.
    """
    num_experts, num_outputs, num_inputs = shape
    groups = (num_experts, num_outputs, num_inputs // GROUP_SIZE)
    blocks = _bytes(source, f"{name}_blocks", (*groups, GROUP_SIZE // 2))
    exponents = _bytes(source, f"{name}_scales", groups)
    scales = powers_of_two(exponents, divided_by=2).to(torch.bfloat16)
    if not bool(scales.isfinite().all()):
        raise _fail(source, f"{name}_scales", "numbers", "a scale that is none")
    values = blocks.view(num_experts, num_outputs, num_inputs // 2)
    return QuantizedWeight(4, GROUP_SIZE, values, scales, None, codes="fp4")


def _bytes(source: CheckpointWeights, tensor: str, shape: Sequence[int]) -> Tensor:
    if source.shape(tensor) != tuple(shape) or source.dtype_of(tensor) is not torch.uint8:
        found = f"{source.dtype_of(tensor)} of shape {list(source.shape(tensor))}"
        raise _fail(source, tensor, f"uint8 of shape {list(shape)}", found)
    return source.read(tensor)


def _fail(source: CheckpointWeights, tensor: str, expected: str, found: str) -> ModelLoadError:
    return ModelLoadError(f"{source.folder}: tensor {tensor!r}: expected {expected}, found {found}")
