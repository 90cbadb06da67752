"""Which source of weights a model folder needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import torch

from ...errors import ModelLoadError
from .dummy import DummyWeights
from .formats import require_quantization
from .gguf.convert import weights_files
from .gguf.source import GgufWeights
from .quantized.packed import PackedWeights
from .quantized.quantization_config import PackedConfig, packed_config
from .quantized.quantizing import Quantization, QuantizingWeights
from .quantized.rounding import MAX_GROUP_SIZE
from .safetensors.checkpoint import CheckpointWeights
from .weight_source import ProgressCallback, WeightSource

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


@contextmanager
def open_weights(
    folder: Path,
    load_format: LoadFormat,
    quantization: Quantization | Literal["none"],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: ProgressCallback | None = None,
) -> Iterator[WeightSource]:
    """Open while the model is built.

    Raises ModelLoadError for a folder that holds no weights that can be read, InvalidRequest for a
    quantization of weights that are quantized already.
    """
    if load_format == "dummy":
        yield _dummy(folder, quantization, dtype, device)
        return
    ggufs = weights_files(folder) if load_format in ("auto", "gguf") else []
    if load_format == "gguf" and not ggufs:
        raise _no_gguf(folder)
    if ggufs:
        with closing(
            GgufWeights(
                ggufs[0], dtype, device, on_progress, has_stored_weights=quantization != "none"
            )
        ) as file:
            if file.is_quantized:
                require_quantization(quantization, folder, "GGUF")
            yield _quantizing(file, quantization, dtype)
        return
    config = packed_config(folder)
    if config is not None:
        require_quantization(quantization, folder, config.method)
    rounds = quantization != "none" or (config is not None and config.rounds_rest)
    with closing(
        CheckpointWeights(folder, dtype, device, on_progress, has_stored_weights=rounds)
    ) as checkpoint:
        if config is None:
            yield _quantizing(checkpoint, quantization, dtype)
            return
        packed = PackedWeights(checkpoint, config)
        yield _rounded_alike(packed, config, dtype) if config.rounds_rest else packed


def _no_gguf(folder: Path) -> ModelLoadError:
    files = sorted(folder.glob("*.gguf"))
    if not files:
        return ModelLoadError(f"{folder} holds no GGUF file")
    return ModelLoadError(
        f"{folder} holds safetensors beside its GGUF files: give the one that is meant, as in "
        f"{files[0]}"
    )


def _quantizing(
    source: WeightSource, quantization: Quantization | Literal["none"], dtype: torch.dtype
) -> WeightSource:
    if quantization == "none":
        return source
    return QuantizingWeights(source, quantization, dtype)


def _dummy(
    folder: Path,
    quantization: Quantization | Literal["none"],
    dtype: torch.dtype,
    device: torch.device,
) -> WeightSource:
    """Random weights, of the bits that the checkpoint's would have."""
    source = DummyWeights(dtype, device)
    config = packed_config(folder) if (folder / "config.json").exists() else None
    if quantization == "none" and config is not None:
        return _rounded_alike(source, config, dtype)
    return _quantizing(source, quantization, dtype)


def _rounded_alike(
    source: WeightSource, config: PackedConfig, dtype: torch.dtype
) -> QuantizingWeights:
    """What is floating in `source`, rounded as what is packed was."""
    group_size = config.group_size or MAX_GROUP_SIZE
    return QuantizingWeights(source, _as_rounded(config), dtype, group_size)


def _as_rounded(config: PackedConfig) -> Quantization:
    if config.activations == "int8":
        return "w8a8"
    return "int4" if config.bits == 4 else "int8"
