"""A checkpoint with its linears rounded, written to a folder in a layout that other engines read.

Loading it gives the same weights as `--quantization` at load: the output projection is written
unchanged, for engines that read no other, and rounded when it is loaded here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
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
from .layouts import Layout, PlannedLinear
from .quantization_config import packed_config
from .quantizing import QuantizingWeights, is_output
from .rounding import MAX_GROUP_SIZE

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


def write_quantized_copy(
    folder: Path,
    out: Path,
    model: ModelTensors,
    *,
    bits: Literal[8, 4],
    group_size: int = MAX_GROUP_SIZE,
    form: Literal["awq", "gptq"] = "gptq",
    version: str,
    shard_bytes: int = SHARD_BYTES,
    on_progress: ByteProgress | None = None,
) -> CopyReport:
    """model: the tensors it takes from `folder`; group_size: upper limit for 4 bits; form: see
    `Layout`.

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
    layout = Layout(bits, group_size, form=form)
    rounded = layout.plan(model.linears)
    if form == "awq":
        group_size = min((plan.group_size for plan in rounded.values()), default=group_size)
    kept = [name for name in model.linears if name not in rounded and not is_output([name])]
    with closing(
        CheckpointWeights(folder, torch.float32, on_progress=on_progress, has_stored_weights=True)
    ) as source:
        for name, shape in model.shapes.items():
            source.require(name, shape)
        with new_folder(out) as draft:
            report = _write_weights(source, draft, rounded, bits, group_size, shard_bytes)
            copy_others(folder, draft)
            write_config(folder, draft, layout.section(rounded, kept, version))
    return report


def _write_weights(
    source: CheckpointWeights,
    out: Path,
    rounded: Mapping[str, PlannedLinear],
    bits: Literal[8, 4],
    group_size: int,
    shard_bytes: int,
) -> CopyReport:
    names = source.names()
    writer = SafetensorsWriter(out, announced(source, names, rounded), shard_bytes)
    rounder = QuantizingWeights(source, "int4" if bits == 4 else "int8", source.dtype, group_size)
    report = CopyReport(bytes_after=writer.total_bytes)
    for tensor in names:
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
        report.errors[name] = relative_error(quantized, weight)
        writer.write(plan.tensors(name, quantized))
    writer.close()
    return report


def announced(
    source: CheckpointWeights, names: Iterable[str], rounded: Mapping[str, PlannedLinear]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What is written for the source's tensors of these names, in this order."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for tensor in names:
        name = tensor.removesuffix(".weight")
        plan = rounded.get(name) if tensor.endswith(".weight") else None
        if plan is None:
            shapes[tensor] = (source.shape(tensor), source.dtype_of(tensor))
        else:
            shapes.update(plan.shapes(name))
    return shapes


def relative_error(quantized: QuantizedWeight, weight: Tensor) -> float:
    """|rounded - weight| / |weight|."""
    exact = weight.float()
    norm = float(exact.norm())
    return float((dequantize(quantized, torch.float32) - exact).norm()) / norm if norm else 0.0


def copy_others(folder: Path, out: Path) -> None:
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


def write_config(folder: Path, out: Path, section: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = section
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
