"""Quantized checkpoints in other tools' layouts, made number by number in numpy.

Written from the layouts' descriptions, independently of the code that reads them: for each module
the unsigned numbers q, zero points and scales are drawn, then packed; its weight is scale * (q -
zero).
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
_LINEARS = ("_proj", ".w1", ".w2", ".w3")
_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "w3": "w1"}


@dataclass
class Module:
    """One linear layer: q [out, in], zeros and scales [out, groups], all by output; the group of
    each input."""

    bits: int
    group_size: int
    q: Array
    zeros: Array
    scales: Array  # float16
    groups: Array  # [in]

    @property
    def weight(self) -> Array:
        """[out, in] float64."""
        weight = np.empty(self.q.shape)
        for index, group in enumerate(self.groups):
            weight[:, index] = self.scales[:, group].astype(np.float64) * (
                self.q[:, index].astype(np.float64) - self.zeros[:, group]
            )
        return weight


def random_module(
    seed: int,
    num_outputs: int,
    num_inputs: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    is_symmetric: bool = False,
) -> Module:
    rng = np.random.default_rng(seed)
    shape = (num_outputs, num_inputs // group_size)
    zeros = rng.integers(1, 1 << bits, shape)
    return Module(
        bits,
        group_size,
        rng.integers(0, 1 << bits, (num_outputs, num_inputs)),
        np.full(shape, 1 << (bits - 1)) if is_symmetric else zeros,
        rng.uniform(0.001, 0.02, shape).astype(np.float16),
        np.arange(num_inputs) // group_size,
    )


def act_ordered(module: Module, seed: int) -> Module:
    """With inputs in arbitrary groups, as GPTQ's act-order leaves them."""
    groups = np.random.default_rng(seed).permutation(module.groups)
    return replace(module, groups=groups)


def gptq_tensors(name: str, module: Module, zero_shift: int = 1) -> dict[str, torch.Tensor]:
    """AutoGPTQ's layout: words along the inputs, zero points' words along the outputs."""
    return {
        f"{name}.qweight": _words(module.q.T, 0, module.bits),
        f"{name}.qzeros": _words(module.zeros.T - zero_shift, 1, module.bits),
        f"{name}.scales": torch.from_numpy(np.ascontiguousarray(module.scales.T)),
        f"{name}.g_idx": torch.from_numpy(module.groups.astype(np.int32)),
    }


def awq_tensors(name: str, module: Module) -> dict[str, torch.Tensor]:
    """AutoAWQ's gemm layout: words along the outputs; number i of a word has the column
    [0, 2, 4, 6, 1, 3, 5, 7][i]."""

    def shuffled(columns: Array) -> Array:
        out = np.empty_like(columns)
        for first in range(0, columns.shape[1], 8):
            for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                out[:, first + place] = columns[:, first + column]
        return out

    return {
        f"{name}.qweight": _words(shuffled(module.q.T), 1, 4),
        f"{name}.qzeros": _words(shuffled(module.zeros.T), 1, 4),
        f"{name}.scales": torch.from_numpy(np.ascontiguousarray(module.scales.T)),
    }


def compressed_tensors(
    name: str, module: Module, *, is_packed: bool, has_zeros: bool
) -> dict[str, torch.Tensor]:
    """compressed-tensors' layout: by output; signed numbers, stored unsigned by packing."""
    half = 1 << (module.bits - 1)
    tensors = {f"{name}.weight_scale": torch.from_numpy(module.scales).to(torch.float16)}
    if is_packed:
        tensors[f"{name}.weight_packed"] = _words(module.q, 1, module.bits)
        tensors[f"{name}.weight_shape"] = torch.tensor(module.q.shape)
        zeros = _words(module.zeros, 0, module.bits)
    else:
        tensors[f"{name}.weight"] = torch.from_numpy((module.q - half).astype(np.int8))
        zeros = torch.from_numpy((module.zeros - half).astype(np.int8))
    if has_zeros:
        tensors[f"{name}.weight_zero_point"] = zeros
    if not np.array_equal(module.groups, np.sort(module.groups)):
        tensors[f"{name}.weight_g_idx"] = torch.from_numpy(module.groups.astype(np.int32))
    return tensors


def _words(numbers: Array, axis: int, bits: int) -> torch.Tensor:
    """int32s that pack consecutive numbers along an axis, the first in the lowest bits; the last
    word is padded with zeros."""
    along = np.moveaxis(numbers.astype(np.uint64), axis, -1)
    count = 32 // bits
    words = np.zeros((along.shape[0], -(-along.shape[1] // count)), dtype=np.uint64)
    for index in range(along.shape[1]):
        words[:, index // count] |= along[:, index] << np.uint64(bits * (index % count))
    packed = np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed))


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], quantization_config: object
) -> Path:
    """Write tensors, and a config.json with only the quantization section."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    section = {"quantization_config": quantization_config}
    (folder / "config.json").write_text(json.dumps(section))
    return folder


def by_input(module: str) -> str:
    """The same for all modules that share an input: GPTQ finds one order for them."""
    layer, _, part = module.rpartition(".")
    return f"{layer}.{_SAME_INPUT.get(part, part)}"


def write_act_ordered(
    checkpoint: Path, out: Path, order_of: Callable[[str], str | None] = by_input
) -> tuple[Path, Path]:
    """Two copies of a checkpoint with the same random linears: in GPTQ's layout with act-order, and
    as floats. order_of: equal for modules whose inputs share an order; None: in order."""
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        name = name.removesuffix(".weight")
        if not name.endswith(_LINEARS):
            packed[f"{name}.weight"] = plain[f"{name}.weight"] = tensor
            continue
        module = random_module(zlib.crc32(name.encode()), *tensor.shape)
        key = order_of(name)
        if key is not None:
            module = act_ordered(module, zlib.crc32(key.encode()))
        packed |= gptq_tensors(name, module)
        plain[f"{name}.weight"] = torch.from_numpy(module.weight).float()  # exact: 11 bits by 5
    section = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    for folder, tensors in ((out / "packed", packed), (out / "plain", plain)):
        shutil.copytree(checkpoint, folder)
        save_file(tensors, folder / "model.safetensors")
    file = out / "packed" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": section}))
    return out / "packed", out / "plain"


def pack_fp8(
    folder: Path,
    block: tuple[int, int] | None,
    scale_dtype: torch.dtype,
    *,
    kept: tuple[str, ...] = ("lm_head",),
    has_input_scales: bool = False,
) -> dict[str, torch.Tensor]:
    """Put a checkpoint's linears in 8-bit floats with a scale for each block of rows and columns
    (None: for each weight); returns what they stand for, float32, by the weights' names."""
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [
            name for name in tensors if name.endswith(tuple(f"{e}.weight" for e in _LINEARS))
        ]:
            if any(part in name for part in kept):
                continue
            numbers, scales, weights[name] = _in_fp8(tensors[name], block, scale_dtype)
            tensors[name], tensors[f"{name}_scale_inv"] = numbers, scales
            if has_input_scales:
                tensors[f"{name.removesuffix('.weight')}.activation_scale"] = torch.ones(())
        save_file(tensors, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = {n: f.name for f in folder.glob("*.safetensors") for n in load_file(f)}
        index.write_text(json.dumps({"weight_map": names}))
    section = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "static" if has_input_scales else "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": list(kept),
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return weights


def _in_fp8(
    weight: torch.Tensor, block: tuple[int, int] | None, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, scales, and their products."""
    rows, columns = block or tuple(weight.shape)
    shape = tuple(
        -(-size // part) for size, part in zip(weight.shape, (rows, columns), strict=True)
    )
    scales = torch.empty(shape, dtype=scale_dtype)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    products = torch.empty(weight.shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            at = (
                slice(row * rows, (row + 1) * rows),
                slice(column * columns, (column + 1) * columns),
            )
            peak = weight[at].abs().max() / 256
            scales[row, column] = peak.to(scale_dtype)
            scale = scales[row, column].float()
            numbers[at] = (weight[at].float() / scale).clamp(-448, 448).to(numbers.dtype)
            products[at] = numbers[at].float() * scale
    return numbers, scales.reshape(()) if block is None else scales, products
