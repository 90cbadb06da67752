"""Linear layers over packed weights of 8 and 4 bits; the C++ is in src/quantized_linear.cpp.

Group scales and offsets are stored as float16 multiples of a power of two a row of the weight,
which costs at most 2^-12 of their size. If in_features or the group size is no multiple of 16,
torch's calls run instead.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..cpu.linear import PackedLinears
from ..ops import Activation, Linear, OutputLinear
from ..quantized_tensors import QuantizedWeight
from ..reference.quantized import rounds_activations
from .arena import packed_weights
from .bindings import library
from .calls import kernel
from .packed_linear import FLOAT_OUTPUT, GATED, PANEL, PLAIN, PackedLinear

_BLOCKS = (128, 64, 32, 16)  # inputs whose products are summed as integers
_MAX_INPUTS = 1 << 16  # of one such sum, which stays within int32
_BLOCK_OF_INPUTS_BYTES = 16
_ALIGNMENT = 64
_torch_calls = PackedLinears(torch.bfloat16)


class _Record(ctypes.Structure):
    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("column_scales", ctypes.c_void_p),
        ("input_order", ctypes.c_void_p),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("panel_bytes", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("num_planes", ctypes.c_int32),
        ("has_scales", ctypes.c_int32),
        ("has_offsets", ctypes.c_int32),
        ("is_fp4", ctypes.c_int32),
    )


def make_linear(weight: QuantizedWeight, bias: Tensor | None) -> Linear:
    if not can_pack(weight):
        return _torch_calls.make_linear(weight, bias)
    return PackedQuantized(weight, bias, PLAIN)


def make_output_linear(weight: QuantizedWeight) -> OutputLinear:
    """The float32 sums, not rounded."""
    if not can_pack(weight):
        return _torch_calls.make_output_linear(weight)
    return PackedQuantized(weight, None, FLOAT_OUTPUT)


def make_gated_linear(
    weight: QuantizedWeight, bias: Tensor | None, activation: Activation
) -> Linear:
    """A panel is 16 gates and their 16 ups, as in `linear`."""
    if not can_pack(weight):
        return _torch_calls.make_gated_linear(weight, bias, activation)
    return PackedQuantized(weight, bias, GATED[activation])


def can_pack(weight: QuantizedWeight) -> bool:
    """Whether the compiled kernel takes it."""
    return (
        weight.in_features % 16 == 0
        and weight.group_size % 16 == 0
        and weight.in_features <= _MAX_INPUTS
    )


class PackedQuantized(PackedLinear):
    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, kind: int) -> None:
        num_rows, num_inputs = weight.out_features, weight.in_features
        is_gated = kind in GATED.values()
        num_outputs = num_rows // 2 if is_gated else num_rows
        num_panels = -(-num_outputs // (PANEL // 2 if is_gated else PANEL))
        num_planes = 1 if rounds_activations(weight) else 2
        has_scales = (
            weight.group_size < num_inputs or weight.offsets is not None or weight.bits == 4
        )
        block = _block_size(weight, has_scales, num_planes)
        num_blocks = -(-num_inputs // block)
        header_bytes = 2 * PANEL * (has_scales + (weight.offsets is not None))
        panel_bytes = num_blocks * header_bytes + PANEL * num_inputs * weight.bits // 8
        self._panels = packed_weights.take(num_panels * panel_bytes)
        scales, offsets, column_scales = _split_scales(weight, block, has_scales)
        self._column_scales = _by_lane(column_scales, num_panels, is_gated)
        self._bias = None if bias is None else _by_lane(bias, num_panels, is_gated)
        order = weight.input_order
        self._input_order = None if order is None else order.contiguous()
        row_bytes = num_planes * num_inputs + _BLOCK_OF_INPUTS_BYTES * num_blocks
        row_bytes = -(-row_bytes // _ALIGNMENT) * _ALIGNMENT
        record = _Record(
            self._panels.data_ptr(),
            _address(self._bias),
            self._column_scales.data_ptr(),
            _address(self._input_order),
            num_inputs,
            num_outputs,
            num_panels,
            block,
            panel_bytes,
            row_bytes,
            kind,
            weight.bits,
            num_planes,
            has_scales,
            offsets is not None,
            weight.codes == "fp4",
        )
        dtype = torch.float32 if kind == FLOAT_OUTPUT else torch.bfloat16
        super().__init__(record, num_outputs, dtype)
        values = weight.values.contiguous()
        library().stemma_pack_quantized(
            self._address, values.data_ptr(), _address(scales), _address(offsets)
        )
        self._row_bytes = row_bytes
        self._run = kernel("stemma_quantized_linear")

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        num_rows = x.shape[0]
        y = self._result(num_rows, out)
        rounded = torch.empty(num_rows * self._row_bytes, dtype=torch.uint8)
        self._run(self._address, x.data_ptr(), y.data_ptr(), num_rows, rounded.data_ptr())
        return y


def _block_size(weight: QuantizedWeight, has_scales: bool, num_planes: int) -> int:
    """Groups are split into blocks; without groups 16-bit inputs still share a power of two."""
    if has_scales:
        return next(size for size in _BLOCKS if weight.group_size % size == 0)
    return _BLOCKS[0] if num_planes == 2 else weight.in_features


def _split_scales(
    weight: QuantizedWeight, block: int, has_scales: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Scales and offsets [rows, blocks] float16, and their units [rows] float32."""
    if not has_scales:
        return None, None, weight.scales[:, 0].float()
    tables = [weight.scales] if weight.offsets is None else [weight.scales, weight.offsets]
    peaks = torch.stack([table.float().abs().amax(1) for table in tables]).amax(0)
    exponents = torch.frexp(peaks).exponent - 15  # so that the largest is in [2^14, 2^15)
    repeats = weight.group_size // block
    halves = [
        torch.ldexp(table.float(), -exponents[:, None]).half().repeat_interleave(repeats, 1)
        for table in tables
    ]
    column_scales = torch.ldexp(torch.ones_like(peaks), exponents)
    return halves[0], (halves[1] if len(halves) == 2 else None), column_scales


def _by_lane(rows: Tensor, num_panels: int, is_gated: bool) -> Tensor:
    """rows, one a row of the weight -> [num_panels * 32] float32 in the order of panels' lanes."""
    parts = rows.float().chunk(2) if is_gated else (rows.float(),)
    lanes = torch.zeros(len(parts), num_panels * PANEL // len(parts))
    for index, part in enumerate(parts):
        lanes[index, : len(part)] = part
    return lanes.view(len(parts), num_panels, -1).transpose(0, 1).flatten().contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
