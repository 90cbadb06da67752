"""Weights that a checkpoint stores in 3, 4 or 8 bits (GPTQ, AWQ, compressed-tensors; 4-bit floats
and bitsandbytes in files of their own), passed on as
they are: numbers are rearranged for `QuantizedWeight`, and never become floating in the model's
linears.

The first three pack unsigned numbers q with w = scale * (q - zero), which is here

    scale * number + offset,  number = q - 2^(bits - 1),  offset = scale * (2^(bits - 1) - zero)

An int32 of a packed tensor holds 32 / bits numbers, the first in its lowest bits. If the inputs of
a group are not consecutive (act-order), the numbers of a row are sorted by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....kernels.ops import Weight
from ....kernels.quantized_tensors import QuantizedWeight
from ....kernels.reference.quantized import dequantize
from ..safetensors.checkpoint import CheckpointWeights
from ..weight_source import WeightSource
from .awq_layout import AWQ_COLUMNS
from .bitsandbytes import read_8_bits
from .float4 import read_float4
from .gptq_layout import numbers_of_3_bits
from .mxfp4 import has_mxfp4, read_mxfp4
from .quantization_config import PackedConfig
from .stacking import stack_weights

_CHUNK_NUMBERS = 1 << 22  # of a weight, sorted at a time

_PACKED_NAMES = {
    "compressed-tensors": "weight_scale", "float4": "weight_scale", "bitsandbytes": "SCB",
}  # fmt: skip

# The place in an int32 of each of eight consecutive columns.
_AWQ_PLACES = tuple(AWQ_COLUMNS.index(column) for column in range(8))


class PackedWeights(WeightSource):
    """A `WeightSource` over a quantized checkpoint; tensors not packed there pass unchanged."""

    def __init__(self, source: CheckpointWeights, config: PackedConfig) -> None:
        self._source = source
        self._config = config

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Packed tensors (a mixture's router, if the quantizer included it) become floating."""
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or not self._is_packed(module):
            return self._source.take(name, shape, dtype)
        weight = self._part(module, shape[0], shape[1])
        assert isinstance(weight, QuantizedWeight), "it is packed"
        return dequantize(weight, dtype or self._source.dtype)

    def take_stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Tensor:
        return self._source.take_stacked(names, shapes)

    def take_weight(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int
    ) -> Weight:
        parts = [
            self._part(name, size, in_features)
            for name, size in zip(names, out_features, strict=True)
        ]
        self._require_one_order(names, parts)
        return stack_weights(parts, self._source.dtype)

    def take_experts(
        self, name: str, num_experts: int, out_features: int, in_features: int
    ) -> Weight:
        if not has_mxfp4(self._source, name):
            return self._source.take_experts(name, num_experts, out_features, in_features)
        weight = read_mxfp4(self._source, name, (num_experts, out_features, in_features))
        return _moved(weight, self._source.device)

    def tie_weight(self, table: Tensor) -> Weight:
        return self._source.tie_weight(table)

    def skip(self, name: str) -> None:
        self._source.skip(name)

    def finish(self) -> None:
        self._source.finish()

    def _require_one_order(self, names: Sequence[str], parts: Sequence[Weight]) -> None:
        """Checks the quantized parts of one product, which share one input."""
        orders = [part.input_order for part in parts if isinstance(part, QuantizedWeight)]
        if len(orders) < len(parts):  # they become floating
            return
        for name, order in zip(names, orders, strict=True):
            if not _is_same(order, orders[0]):
                kind = "weight_g_idx" if self._config.method == "compressed-tensors" else "g_idx"
                raise ModelLoadError(
                    f"{self._source.folder}: tensors '{names[0]}.{kind}' and '{name}.{kind}': "
                    "expected one order of inputs (act-order) for parts of one product, found two"
                )

    def _part(self, name: str, out_features: int, in_features: int) -> Weight:
        config, source = self._config, self._source
        shape = (out_features, in_features)
        if not self._is_packed(name):
            if name not in config.kept:
                raise _not_packed(source, name, self._packed_name(name), config.method)
            return source.take_weight([name], [out_features], in_features)
        if config.method == "compressed-tensors":
            weight = read_compressed(source, name, shape, config.activations)
        elif config.method == "gptq":
            weight = read_gptq(source, name, shape, config.zero_shift)
        elif config.method == "float4":
            assert config.group_size is not None, "4-bit floats have scales for groups"
            weight = read_float4(source, name, shape, config.group_size, config.packed)
        elif config.method == "bitsandbytes":
            weight = read_8_bits(source, name, shape)
        else:
            weight = read_awq(source, name, shape)
        return _moved(weight, source.device)

    def _is_packed(self, module: str) -> bool:
        return self._packed_name(module) in self._source

    def _packed_name(self, module: str) -> str:
        """The name of a tensor that a packed module alone has."""
        return f"{module}.{_PACKED_NAMES.get(self._config.method, 'qweight')}"


def read_gptq(
    source: CheckpointWeights, name: str, shape: tuple[int, int], zero_shift: int
) -> QuantizedWeight:
    """qweight [in * bits / 32, out] int32, packed along inputs (3, 4 or 8 bits); qzeros
    [groups, out * bits / 32] int32, packed along outputs, each less `zero_shift`; scales
    [groups, out]; perhaps g_idx [in], the group of each input."""
    num_outputs, num_inputs = shape
    packed = source.read(f"{name}.qweight")
    bits = _bits_of(
        source, f"{name}.qweight", packed, (0, num_inputs), (1, num_outputs), allowed=(3, 4, 8)
    )
    scales = _scales(source, f"{name}.scales")
    group_size = _group_size_of(source, f"{name}.scales", scales, (0, num_inputs), num_outputs)
    order = _input_order(source, f"{name}.g_idx", num_inputs, group_size)
    if bits == 3:  # as 4: the same numbers, in half bytes
        zeros = numbers_of_3_bits(_words(source, f"{name}.qzeros"))
        _require_shape(source, f"{name}.qzeros", zeros, scales.shape)
        numbers = numbers_of_3_bits(packed.t())
        values = numbers[:, ::2] | numbers[:, 1::2] << 4
        zeros = zeros.t().float() + zero_shift
        weight = _affine(4, group_size, values, scales.t().contiguous(), zeros)
        return _sorted_by_group(weight, order)
    zeros = _unpacked(_words(source, f"{name}.qzeros"), bits)
    _require_shape(source, f"{name}.qzeros", zeros, scales.shape)
    # Packed along inputs, little-endian: of a row's int32s, the bytes are in the right order.
    values = _octets(packed.t())
    if bits == 8:
        values = values.bitwise_xor_(0x80).view(torch.int8)  # q - 128
    zeros = zeros.t().float() + zero_shift
    weight = _affine(bits, group_size, values, scales.t().contiguous(), zeros)
    return _sorted_by_group(weight, order)


def read_awq(source: CheckpointWeights, name: str, shape: tuple[int, int]) -> QuantizedWeight:
    """qweight [in, out / 8] int32 and qzeros [groups, out / 8] int32, both packed along outputs in
    AWQ's order; scales [groups, out]."""
    num_outputs, num_inputs = shape
    packed = source.read(f"{name}.qweight")
    _bits_of(source, f"{name}.qweight", packed, (1, num_outputs), (0, num_inputs), allowed=(4,))
    scales = _scales(source, f"{name}.scales")
    group_size = _group_size_of(source, f"{name}.scales", scales, (0, num_inputs), num_outputs)
    zeros = _awq_ordered(_unpacked(_words(source, f"{name}.qzeros"), 4))
    _require_shape(source, f"{name}.qzeros", zeros, scales.shape)
    numbers = _awq_ordered(_unpacked(packed, 4)).t().contiguous()
    values = numbers[:, ::2] | numbers[:, 1::2] << 4
    return _affine(4, group_size, values, scales.t().contiguous(), zeros.t().float())


def read_compressed(
    source: CheckpointWeights,
    name: str,
    shape: tuple[int, int],
    activations: Literal["exact", "int8"],
) -> QuantizedWeight:
    """weight_packed [out, in * bits / 32] int32, packed along inputs, or weight [out, in] int8;
    weight_scale [out, groups]; perhaps weight_zero_point, packed along outputs in the first case
    and signed int8 in the second, and weight_g_idx [in]."""
    num_outputs, num_inputs = shape
    scales = _scales(source, f"{name}.weight_scale")
    group_size = _group_size_of(
        source, f"{name}.weight_scale", scales, (1, num_inputs), num_outputs
    )
    order = _input_order(source, f"{name}.weight_g_idx", num_inputs, group_size)
    zeros = f"{name}.weight_zero_point"
    unsigned = None
    if f"{name}.weight_packed" not in source:
        values, bits = source.read(f"{name}.weight"), 8
        _require_shape(source, f"{name}.weight", values, shape)
        if values.dtype is not torch.int8:
            raise _fail(source, f"{name}.weight", "int8", str(values.dtype))
        if zeros in source:
            unsigned = source.read(zeros).float() + 128
    else:
        source.skip(f"{name}.weight_shape")
        packed = source.read(f"{name}.weight_packed")
        bits = _bits_of(source, f"{name}.weight_packed", packed, (1, num_inputs), (0, num_outputs))
        values = _octets(packed)
        if bits == 8:
            values = values.bitwise_xor_(0x80).view(torch.int8)
        if zeros in source:
            unsigned = _unpacked(_words(source, zeros).t(), bits)[:, :num_outputs].t().float()
    if unsigned is None:
        weight = QuantizedWeight(_checked(bits), group_size, values, scales, None, activations)
    else:
        _require_shape(source, zeros, unsigned, scales.shape)
        weight = _affine(bits, group_size, values, scales, unsigned, activations)
    return _sorted_by_group(weight, order)


def _affine(
    bits: int,
    group_size: int,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor,
    activations: Literal["exact", "int8"] = "exact",
) -> QuantizedWeight:
    """zeros: unsigned, with the shape of scales; zeros at the middle need no offsets."""
    middle = 1 << (bits - 1)
    is_symmetric = bool((zeros == middle).all())
    offsets = None if is_symmetric else scales * (middle - zeros)
    return QuantizedWeight(_checked(bits), group_size, values, scales, offsets, activations)


def _words(source: CheckpointWeights, tensor: str) -> Tensor:
    """Packed numbers [N, M] int32."""
    words = source.read(tensor)
    if words.dtype is not torch.int32 or words.dim() != 2:
        found = f"{words.dtype} of shape {list(words.shape)}"
        raise _fail(source, tensor, "a matrix of int32", found)
    return words


def _scales(source: CheckpointWeights, tensor: str) -> Tensor:
    scales = source.read(tensor)
    if not scales.dtype.is_floating_point:
        raise _fail(source, tensor, "floating point", str(scales.dtype))
    return scales.float()


def _checked(bits: int) -> Literal[8, 4]:
    return 4 if bits == 4 else 8


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """[N, M] int32 -> [N, M * 32 / bits] uint8, in the order of an int32's bits."""
    octets = _octets(packed)
    return octets if bits == 8 else _halves(octets)


def _halves(octets: Tensor) -> Tensor:
    """[N, M] uint8 -> [N, 2 * M], the low half of each byte first."""
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _octets(packed: Tensor) -> Tensor:
    """[N, M] int32 -> [N, 4 * M] uint8, each word's lowest byte first."""
    # As one axis: of a tensor with one column torch calls every stride contiguous.
    return packed.contiguous().view(-1).view(torch.uint8).view(len(packed), -1)


def _awq_ordered(numbers: Tensor) -> Tensor:
    """[N, M] in the order of an int32's bits -> by column."""
    return numbers.view(len(numbers), -1, 8)[..., list(_AWQ_PLACES)].flatten(1)


def _bits_of(
    source: CheckpointWeights,
    tensor: str,
    packed: Tensor,
    along: tuple[int, int],
    across: tuple[int, int],
    allowed: tuple[int, ...] = (4, 8),
) -> int:
    """The bits of a packed tensor's numbers, packed along one axis; both axes as (axis, size when
    unpacked)."""
    for bits in allowed:
        expected = [0, 0]
        expected[across[0]], expected[along[0]] = across[1], along[1] * bits // 32
        if list(packed.shape) == expected and along[1] * bits % 32 == 0:
            if packed.dtype is not torch.int32:
                raise _fail(source, tensor, "int32", str(packed.dtype))
            return bits
    sizes = f"{across[1]} by {along[1]} numbers of {' or '.join(map(str, allowed))} bits"
    raise _fail(source, tensor, sizes, f"shape {list(packed.shape)}")


def _group_size_of(
    source: CheckpointWeights,
    tensor: str,
    scales: Tensor,
    inputs: tuple[int, int],
    num_outputs: int,
) -> int:
    """inputs: (axis of the groups, number of inputs)."""
    axis, num_inputs = inputs
    num_groups = scales.shape[axis] if scales.dim() == 2 else 0
    if not num_groups or scales.shape[1 - axis] != num_outputs or num_inputs % num_groups:
        expected = f"a scale for each of {num_outputs} outputs and each group of inputs"
        raise _fail(source, tensor, expected, f"shape {list(scales.shape)}")
    return num_inputs // num_groups


def _input_order(
    source: CheckpointWeights, tensor: str, num_inputs: int, group_size: int
) -> Tensor | None:
    """The inputs, group after group [num_inputs] int32, from `tensor`, which has each one's group;
    None if they are in this order. (compressed-tensors writes -1 where nothing is ordered.)"""
    if tensor not in source:
        return None
    group_of = source.read(tensor)
    _require_shape(source, tensor, group_of, (num_inputs,))
    if group_of.dtype not in (torch.int32, torch.int64):
        raise _fail(source, tensor, "int32", str(group_of.dtype))
    groups = torch.arange(num_inputs, dtype=group_of.dtype) // group_size
    if torch.equal(group_of, groups) or bool((group_of == -1).all()):
        return None
    by_group, order = group_of.sort(stable=True)
    if not torch.equal(by_group, groups):
        raise _fail(source, tensor, f"{group_size} inputs in each group", "other numbers of them")
    return order.to(torch.int32)


def _sorted_by_group(weight: QuantizedWeight, order: Tensor | None) -> QuantizedWeight:
    """Sorts a weight on the CPU, whose numbers are still in the order of inputs, IN PLACE."""
    if order is None:
        return weight
    for rows in torch.split(weight.values, max(1, _CHUNK_NUMBERS // weight.in_features)):
        if weight.bits == 8:
            rows.copy_(rows.index_select(1, order))
            continue
        numbers = _halves(rows).index_select(1, order)
        rows.copy_(numbers[:, ::2] | numbers[:, 1::2] << 4)
    return replace(weight, input_order=order)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _require_shape(
    source: CheckpointWeights, tensor: str, found: Tensor, expected: Sequence[int]
) -> None:
    if tuple(found.shape) != tuple(expected):
        raise _fail(source, tensor, f"shape {list(expected)}", f"{list(found.shape)}")


def _fail(source: CheckpointWeights, tensor: str, expected: str, found: str) -> ModelLoadError:
    return ModelLoadError(f"{source.folder}: tensor {tensor!r}: expected {expected}, found {found}")


def _not_packed(source: CheckpointWeights, name: str, packed: str, method: str) -> ModelLoadError:
    """The error for a floating module that the configuration does not exclude."""
    missing = f"{source.folder}: tensor {packed!r} is missing, while quantization_config says "
    missing += f"quant_method {method!r}"
    floating = f"{name}.weight"
    if floating not in source:
        return ModelLoadError(missing)
    return ModelLoadError(
        f"{missing}: {floating!r} is there instead, {source.dtype_of(floating)}; take "
        "quantization_config out of config.json if no weights are packed, or name in it the "
        "modules that are not"
    )


def _moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    return weight if device.type == "cpu" else weight.map(lambda tensor: tensor.to(device))
