"""The locations of a safetensors file's tensors, from its header. Torch-free.

Format: eight bytes with the header's length, a JSON header, the tensors' bytes
(github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ....errors import ModelLoadError
from ..model_files import open_plain_file

# Torch's names and bytes of an element, by the format's names.
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
# Errors from an invalid or lying header: infinite offsets, or endless brackets.
_UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in its file; checked against the file's size."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    start: int  # in the file
    num_bytes: int


def open_header(path: Path) -> tuple[int, dict[str, Place]]:
    """An open descriptor, which the caller closes, and the places of the tensors.

    Raises ModelLoadError if it is not a safetensors file, or is truncated.
    """
    descriptor = open_plain_file(path)
    try:
        return descriptor, _places(descriptor)
    except _UNREADABLE as error:
        os.close(descriptor)
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from None


def _places(descriptor: int) -> dict[str, Place]:
    file_bytes = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if file_bytes < 8 or length > min(_MAX_HEADER_BYTES, file_bytes - 8):
        raise ValueError("its header does not fit in it")
    header = json.loads(os.pread(descriptor, length, 8))
    return {
        name: _place(name, about, 8 + length, file_bytes)
        for name, about in header.items()
        if name != "__metadata__"
    }


def _place(name: str, about: dict[str, Any], first: int, file_bytes: int) -> Place:
    dtype, shape = about["dtype"], tuple(int(size) for size in about["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    begin, end = (int(offset) for offset in about["data_offsets"])
    fits = min((*shape, begin), default=0) >= 0 and first + end <= file_bytes
    if not fits or end - begin != prod(shape) * DTYPES[dtype][1]:
        raise ValueError(f"tensor {name!r} does not fit its place in the file")
    return Place(dtype, shape, first + begin, end - begin)
