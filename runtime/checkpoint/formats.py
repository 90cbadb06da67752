"""Checks of requested formats, for loading and for `stemma plan` before it. Torch-free.

Each error names the requested format and the supported ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from ...errors import InvalidRequest
from ...kernels.kv_cache_dtype import KVCacheDtype
from .gguf.convert import weights_files
from .gguf.shards import GgufModel
from .quantized.quantization_config import packed_config


def stored_method(folder: Path) -> str | None:
    """The method by which the checkpoint's weights are quantized ("awq", "GGUF"); None: they are
    floating, or become so while they are loaded (8-bit floats).

    Raises ModelLoadError for a method that is not supported."""
    for first in weights_files(folder)[:1]:
        with closing(GgufModel(first)) as model:
            return "GGUF" if model.is_quantized else None
    config = packed_config(folder)
    return None if config is None or config.is_floating else config.method


def require_quantization(quantization: str, folder: Path, method: str | None) -> None:
    """quantization: as `--quantization`; method: the `stored_method` of the folder.

    Raises InvalidRequest for weights that are quantized already.
    """
    if quantization != "none" and method is not None:
        allowed = f"none with {folder}, whose weights are quantized already ({method})"
        raise InvalidRequest.of("quantization", quantization, allowed)


def require_kv_cache_dtype(
    kv_cache_dtype: KVCacheDtype, known: Sequence[KVCacheDtype], dtype: str, device: str
) -> None:
    """known: the formats that the device's kernels read with that dtype ("bfloat16"). `KVLayout`
    checks the formats of latents.

    Raises InvalidRequest for any other.
    """
    if kv_cache_dtype not in known:
        allowed = f"{' or '.join(known)} with dtype={dtype} on {device}"
        raise InvalidRequest.of("kv_cache_dtype", kv_cache_dtype, allowed)
