"""Linears in 4-bit floats, passed on as they are: NVFP4 and MXFP4.

    NAME.weight_packed        [outputs, inputs / 2] uint8, two codes of floats (E2M1) a byte, the
    (modelopt: NAME.weight)   one of an even input in the low half
    NAME.weight_scale         NVFP4: [outputs, inputs / 16] float8 (E4M3)
                              MXFP4: [outputs, inputs / 32] uint8, powers of two (E8M0)
    NAME.weight_global_scale  NVFP4: one float32, by which scales are divided
    (modelopt: NAME.weight_scale_2, by which they are multiplied)

Scales of inputs are not used: products take their inputs as they are. Scales are halved, since the
numbers of a `QuantizedWeight` are twice the floats.

Sources: compressed-tensors' `nvfp4-pack-quantized` and `mxfp4-pack-quantized`; NVIDIA's Model
Optimizer; OCP Microscaling Formats, 5.2 to 5.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.quantized_tensors import QuantizedWeight
from ..safetensors.checkpoint import CheckpointWeights
from .e8m0 import powers_of_two

_UNUSED = ("input_global_scale", "input_scale")


def read_float4(
    source: CheckpointWeights, name: str, shape: tuple[int, int], group_size: int, packed: str
) -> QuantizedWeight:
    """shape: (outputs, inputs); packed: the last name of the tensor with the codes. On the CPU.

    Raises ModelLoadError for tensors of another shape or type, and for scales that are no numbers.
    """
    num_outputs, num_inputs = shape
    values = source.read(f"{name}.{packed}")
    _require(source, f"{name}.{packed}", values, torch.uint8, (num_outputs, num_inputs // 2))
    stored = source.read(f"{name}.weight_scale")
    groups = (num_outputs, num_inputs // group_size)
    if stored.dtype is torch.uint8:
        _require(source, f"{name}.weight_scale", stored, torch.uint8, groups)
        scales = powers_of_two(stored, divided_by=2).to(torch.bfloat16)
    else:
        _require(source, f"{name}.weight_scale", stored, torch.float8_e4m3fn, groups)
        scales = stored.float() * (_factor(source, name) / 2)
    if not bool(scales.isfinite().all()):
        raise _fail(source, f"{name}.weight_scale", "numbers", "a scale that is none")
    for unused in _UNUSED:
        source.skip(f"{name}.{unused}")
    return QuantizedWeight(4, group_size, values, scales, None, codes="fp4")


def _factor(source: CheckpointWeights, name: str) -> Tensor:
    """Of all scales [] float32."""
    multiplied = f"{name}.weight_scale_2"
    if multiplied in source:
        return _one(source, multiplied)
    return 1 / _one(source, f"{name}.weight_global_scale")


def _one(source: CheckpointWeights, tensor: str) -> Tensor:
    value = source.read(tensor).float()
    if value.numel() != 1 or not bool(value.isfinite().all() & (value != 0).all()):
        raise _fail(source, tensor, "one number, not 0", f"{value.flatten()[:4].tolist()}")
    return value.view(())


def _require(
    source: CheckpointWeights,
    tensor: str,
    found: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
) -> None:
    if found.dtype is not dtype or tuple(found.shape) != tuple(shape):
        expected = f"{dtype} of shape {list(shape)}"
        raise _fail(source, tensor, expected, f"{found.dtype} of shape {list(found.shape)}")


def _fail(source: CheckpointWeights, tensor: str, expected: str, found: str) -> ModelLoadError:
    return ModelLoadError(f"{source.folder}: tensor {tensor!r}: expected {expected}, found {found}")
