"""Calls into the compiled library, recorded with their arguments during a recording."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .bindings import library

# Mirrored by src/capture.cpp.
ATTENTION, LORA = 3, 10
_KINDS = {
    "stemma_linear": 0,
    "stemma_rms_norm": 1,
    "stemma_rotate_and_store": 2,
    "stemma_attention": ATTENTION,
    "stemma_gather_rows": 4,
    "stemma_norm_slices": 5,
    "stemma_scale": 6,
    "stemma_add": 7,
    "stemma_quantized_linear": 8,
    "stemma_act_and_mul": 9,
    "stemma_lora": LORA,
    "stemma_all_reduce": 11,
    "stemma_gather_share": 12,
    "stemma_join_columns": 13,
}

Call = tuple[int, ...]
"""The kernel's number, then its arguments: addresses, counts, the bits of doubles."""


class _Recording(threading.local):
    """Another thread's calls are another engine's."""

    calls: list[Call] | None = None


_recording = _Recording()


def kernel(name: str) -> Callable[..., None]:
    """A function of the library."""
    function, kind = getattr(library(), name), _KINDS[name]

    def call(*args: Any) -> None:
        function(*args)
        if _recording.calls is not None:
            _recording.calls.append((kind, *map(_as_int, args)))

    return call


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """The calls that this thread makes inside the block."""
    assert _recording.calls is None, "recordings do not nest"
    calls = _recording.calls = []
    try:
        yield calls
    finally:
        _recording.calls = None


def _as_int(value: Any) -> int:
    if isinstance(value, float):
        bits: int = struct.unpack("q", struct.pack("d", value))[0]
        return bits
    return 0 if value is None else int(value)
