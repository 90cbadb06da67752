"""The format in which a checkpoint's weights are stored. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ..runtime.checkpoint.gguf.convert import weights_files
from ..runtime.checkpoint.quantized.quantization_config import packed_config
from .model_shape import ModelShape

# Bits a parameter of a GGUF file, whose tensors may have several formats: 4-bit files have 4.5 to
# 6, 8-bit ones 6.5 to 9, floating ones 16 or more.
_MOST_BITS_OF_INT4 = 6.3
_MOST_BITS_OF_INT8 = 12.0


def stored_quantization(folder: Path, shape: ModelShape) -> Literal["none", "int8", "w8a8", "int4"]:
    """The value of `--quantization` nearest to its weights; "none" for floating ones.

    Raises ModelLoadError for a quantization that is not supported.
    """
    ggufs = weights_files(folder)
    if ggufs:
        bits = 8 * sum(file.stat().st_size for file in ggufs) / shape.num_parameters
        if bits <= _MOST_BITS_OF_INT4:
            return "int4"
        return "int8" if bits <= _MOST_BITS_OF_INT8 else "none"
    packed = packed_config(folder)
    if packed is None:
        return "none"
    if packed.bits == 4:
        return "int4"
    return "w8a8" if packed.activations == "int8" else "int8"
