"""A checkpoint with its linears rounded, written to a folder in GPTQ's layout.

Loading it gives the same weights as `--quantization` at load: the output projection is written
unchanged, for engines that read no other, and rounded when it is loaded here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ....errors import ModelLoadError
from ....frontend.client.progress import ByteProgress
from ....kernels.quantized_tensors import QuantizedWeight
from ....kernels.reference.quantized import dequantize
from ..new_folder import new_folder, require_new
from ..safetensors.checkpoint import CheckpointWeights
from ..safetensors.safetensors_writer import SHARD_BYTES, SafetensorsWriter
from ..weight_source import ModelTensors
from .gptq_layout import fits_gptq, gptq_shapes, gptq_tensors
from .quantization_config import OUR_QUANTIZER, packed_config
from .quantizing import QuantizingWeights, bits_for, is_output
from .rounding import MAX_GROUP_SIZE, group_size_for

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(slots=True)
class CopyReport:
    """The result of writing a checkpoint."""

    errors: dict[str, float] = field(
        default_factory=dict
    )  # |rounded - weight| / |weight|, by module
    num_kept: int = 0  # tensors copied unchanged
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass(frozen=True, slots=True)
class _Rounded:
    """How a module is written."""

    bits: Literal[8, 4]
    group_size: int
    shape: tuple[int, int]


def write_quantized_copy(
    folder: Path,
    out: Path,
    model: ModelTensors,
    *,
    bits: Literal[8, 4],
    group_size: int = MAX_GROUP_SIZE,
    version: str,
    shard_bytes: int = SHARD_BYTES,
    on_progress: ByteProgress | None = None,
) -> CopyReport:
    """model: the tensors it takes from `folder`; group_size: upper limit for 4 bits.

    `out` must not exist; it appears when all is written. Peak memory: a linear or two.

    Raises:
        InvalidRequest: `out` exists, or cannot be made.
        ModelLoadError: a checkpoint that cannot be read, lacks a tensor of the model, or is
            quantized already; or no room.
    """
    require_new(out)
    config = packed_config(folder)
    if config is not None:
        raise ModelLoadError(f"{folder} is quantized already ({config.method})")
    rounded = _plan(model.linears, bits, group_size)
    kept = [name for name in model.linears if name not in rounded and not is_output([name])]
    with closing(
        CheckpointWeights(folder, torch.float32, on_progress=on_progress, has_stored_weights=True)
    ) as source:
        for name, shape in model.shapes.items():
            source.require(name, shape)
        with new_folder(out) as draft:
            report = _write_weights(source, draft, rounded, bits, group_size, shard_bytes)
            _copy_others(folder, draft)
            section = _quantization_config(rounded, kept, bits, group_size, version)
            _write_config(folder, draft, section)
    return report


def _plan(
    linears: Mapping[str, tuple[int, int]], bits: Literal[8, 4], group_size: int
) -> dict[str, _Rounded]:
    rounded = {}
    for name, (num_outputs, num_inputs) in linears.items():
        size = num_inputs if bits == 8 else group_size_for(num_inputs, group_size)
        is_rounded = bits_for([name], num_inputs, "int4" if bits == 4 else "int8") is not None
        if is_output([name]) or not is_rounded or size is None:
            continue
        if fits_gptq(num_outputs, num_inputs, bits):
            rounded[name] = _Rounded(bits, size, (num_outputs, num_inputs))
    return rounded


def _write_weights(
    source: CheckpointWeights,
    out: Path,
    rounded: Mapping[str, _Rounded],
    bits: Literal[8, 4],
    group_size: int,
    shard_bytes: int,
) -> CopyReport:
    writer = SafetensorsWriter(out, _announced(source, rounded), shard_bytes)
    rounder = QuantizingWeights(source, "int4" if bits == 4 else "int8", source.dtype, group_size)
    report = CopyReport(bytes_after=writer.total_bytes)
    for tensor in source.names():
        report.bytes_before += source.num_bytes(tensor)
        name = tensor.removesuffix(".weight")
        plan = rounded.get(name) if tensor.endswith(".weight") else None
        if plan is None:
            writer.write({tensor: source.read(tensor)})
            report.num_kept += 1
            continue
        weight = source.take_weight([name], [plan.shape[0]], plan.shape[1])
        assert isinstance(weight, Tensor)
        quantized = rounder.rounded([name], weight)
        assert isinstance(quantized, QuantizedWeight)
        report.errors[name] = _relative_error(quantized, weight)
        writer.write(gptq_tensors(name, quantized))
    writer.close()
    return report


def _announced(
    source: CheckpointWeights, rounded: Mapping[str, _Rounded]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for tensor in source.names():
        name = tensor.removesuffix(".weight")
        plan = rounded.get(name) if tensor.endswith(".weight") else None
        if plan is None:
            shapes[tensor] = (source.shape(tensor), source.dtype_of(tensor))
        else:
            shapes.update(gptq_shapes(name, *plan.shape, plan.bits, plan.group_size))
    return shapes


def _relative_error(quantized: QuantizedWeight, weight: Tensor) -> float:
    exact = weight.float()
    norm = float(exact.norm())
    return float((dequantize(quantized, torch.float32) - exact).norm()) / norm if norm else 0.0


def _copy_others(folder: Path, out: Path) -> None:
    """Copy tokenizer, templates, licence: all files except weights and hidden ones."""
    for file in folder.rglob("*"):
        place = file.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in place.parts)
        if is_hidden or not file.is_file() or file.suffix in _WEIGHTS:
            continue
        if file.name.endswith(".index.json") or place == Path("config.json"):
            continue
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, out / place)


def _write_config(folder: Path, out: Path, section: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = section
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _quantization_config(
    rounded: Mapping[str, _Rounded],
    kept: Sequence[str],
    bits: int,
    group_size: int,
    version: str,
) -> dict[str, Any]:
    """GPTQModel's fields; `dynamic` names the linears that stay floating, and those whose inputs no
    full group divides."""
    usual = -1 if bits == 8 else group_size
    dynamic: dict[str, dict[str, int]] = {f"-:^{re.escape(name)}$": {} for name in kept}
    dynamic |= {
        f"+:^{re.escape(name)}$": {"group_size": plan.group_size}
        for name, plan in rounded.items()
        if bits == 4 and plan.group_size != group_size
    }
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": bits,
        "group_size": usual,
        "sym": bits == 8,
        "desc_act": False,
        "lm_head": False,
        "true_sequential": False,
        **({"dynamic": dynamic} if dynamic else {}),
        "meta": {"quantizer": [f"{OUR_QUANTIZER}:{version}"]},
    }
