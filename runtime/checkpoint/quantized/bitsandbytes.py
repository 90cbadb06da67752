"""bitsandbytes' weights: 4 bits by a table of 16 floats (NF4, FP4), and 8 bits a row.

4 bits, dequantized while they are loaded:

    NAME.weight            uint8, any shape: two codes a byte, the first in the HIGH half; codes of
                           all rows one after the other
    NAME.weight.quant_map  [16] float32: what a code stands for
    NAME.weight.absmax     a scale for each `blocksize` codes, float32, or uint8 (nested)
    NAME.weight.quant_state.bitsandbytes__nf4 (or __fp4)
                           uint8: JSON with blocksize, shape and, if nested, nested_blocksize and
                           nested_offset
    NAME.weight.nested_absmax, NAME.weight.nested_quant_map
                           absmax = nested_quant_map[absmax] * nested_absmax + nested_offset

8 bits, passed on as they are (weight = SCB / 127 * number; the columns that LLM.int8 multiplies in
16 bits, Dettmers et al. 2022, arXiv:2208.07339, are those of inputs, which are never rounded here):

    NAME.weight            [outputs, inputs] int8
    NAME.SCB               [outputs] float32

Source: github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py (QuantState) and
nn/modules.py; Dettmers et al. 2023 (QLoRA, arXiv:2305.14314), 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.quantized_tensors import QuantizedWeight
from ..safetensors.checkpoint import CheckpointWeights

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_OTHERS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_CHUNK_NUMBERS = 1 << 21  # of a weight at a time, in float32; a guess
_MAX_BLOCK = 1 << 16  # guess, far above any


class BitsAndBytes4Format:
    """A `FloatFormat`."""

    def is_packed(self, source: CheckpointWeights, name: str) -> bool:
        return any(f"{name}.{state}" in source for state in _STATES)

    def beside(self, name: str) -> Iterable[str]:
        return [f"{name}.{own}" for own in (*_STATES, *_OTHERS)]

    def require(self, source: CheckpointWeights, name: str, shape: Sequence[int]) -> None:
        state = _state(source, name)
        if state.get("shape") != list(shape):
            raise _fail(source, name, f"shape {list(shape)}", f"{state.get('shape')}")

    def read_into(self, source: CheckpointWeights, name: str, target: Tensor) -> None:
        state = _state(source, name)
        codes, table = source.read(name).view(-1), source.read(f"{name}.quant_map").float()
        size, total = _block_size(source, name, state, "blocksize"), target.numel()
        scales = _scales(source, name, state, -(-total // size))
        if codes.dtype is not torch.uint8 or 2 * len(codes) != total or table.shape != (16,):
            raise _fail(source, name, f"{total} codes of 16 floats", f"{codes.dtype} {len(codes)}")
        flat = target.view(-1)
        step = max(1, _CHUNK_NUMBERS // size) * size
        for first in range(0, total, step):
            own = codes[first // 2 : (first + step) // 2]
            numbers = table[torch.stack((own >> 4, own & 15), 1).flatten().int()]
            factors = scales[first // size : -(-(first + len(numbers)) // size)]
            numbers *= factors.repeat_interleave(size)[: len(numbers)]
            flat[first : first + len(numbers)] = numbers
        for each in self.beside(name):
            source.skip(each)


def has_8_bits(source: CheckpointWeights, name: str) -> bool:
    """Whether the linear `name` is stored in 8 bits."""
    return f"{name}.SCB" in source


def read_8_bits(source: CheckpointWeights, name: str, shape: tuple[int, int]) -> QuantizedWeight:
    """Raises ModelLoadError for tensors of another shape or type."""
    values, peaks = source.read(f"{name}.weight"), source.read(f"{name}.SCB")
    source.skip(f"{name}.weight_format")
    if values.dtype is not torch.int8 or tuple(values.shape) != shape:
        found = f"{values.dtype} of shape {list(values.shape)}"
        raise _fail(source, f"{name}.weight", f"int8 of shape {list(shape)}", found)
    if not peaks.dtype.is_floating_point or peaks.numel() != shape[0]:
        found = f"{peaks.dtype} of shape {list(peaks.shape)}"
        raise _fail(source, f"{name}.SCB", f"a float for each of {shape[0]} rows", found)
    return QuantizedWeight(8, shape[1], values, peaks.float().view(-1, 1) / 127, None)


def _state(source: CheckpointWeights, name: str) -> dict[str, Any]:
    """What bitsandbytes says of the packed tensor."""
    tensor = next(f"{name}.{state}" for state in _STATES if f"{name}.{state}" in source)
    try:
        state = json.loads(bytes(source.read(tensor).tolist()))
    except (ValueError, TypeError) as error:
        raise _fail(source, tensor, "JSON as bytes", str(error)) from None
    if not isinstance(state, dict):
        raise _fail(source, tensor, "a JSON object", type(state).__name__)
    return state


def _scales(source: CheckpointWeights, name: str, state: dict[str, Any], num_blocks: int) -> Tensor:
    """[num_blocks] float32."""
    scales = source.read(f"{name}.absmax").view(-1)
    if scales.dtype is torch.uint8:
        table = source.read(f"{name}.nested_quant_map").float()
        peaks = source.read(f"{name}.nested_absmax").float()
        size = _block_size(source, name, state, "nested_blocksize")
        offset = state.get("nested_offset", 0.0)
        if table.shape != (256,) or len(peaks) != -(-len(scales) // size):
            raise _fail(source, f"{name}.nested_absmax", "a scale a block", f"{len(peaks)}")
        scales = table[scales.int()] * peaks.repeat_interleave(size)[: len(scales)] + offset
    if len(scales) != num_blocks or not scales.dtype.is_floating_point:
        found = f"{scales.dtype} of shape {list(scales.shape)}"
        raise _fail(source, f"{name}.absmax", f"{num_blocks} scales", found)
    return scales.float()


def _block_size(source: CheckpointWeights, name: str, state: dict[str, Any], field: str) -> int:
    size = state.get(field)
    if type(size) is not int or not 0 < size <= _MAX_BLOCK or size % 2:
        raise _fail(source, name, f"{field}: an even integer in [2, {_MAX_BLOCK:,}]", repr(size))
    return size


def _fail(source: CheckpointWeights, name: str, expected: str, found: str) -> ModelLoadError:
    return ModelLoadError(f"{source.folder}: tensor {name!r}: expected {expected}, found {found}")
