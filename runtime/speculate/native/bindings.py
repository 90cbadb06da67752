"""The C++ of `src/` in this process, loaded once.

`python -m stemma.runtime.speculate.native.bindings` compiles it ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from ....native_library import NativeLibrary

LIBRARY = NativeLibrary("drafting", "drafting code", Path(__file__).parent / "src")
_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
# Result, then arguments, by function name.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "stemma_new_drafter": (_POINTER, _INT64, _INT32, _INT32, ctypes.c_float),
    "stemma_free_drafter": (None, _POINTER),
    "stemma_open_text": (_INT32, _POINTER, _POINTER, _POINTER, _INT64),
    "stemma_extend_text": (None, _POINTER, _INT32, _POINTER, _INT64),
    "stemma_close_text": (None, _POINTER, _INT32),
    "stemma_propose": (_INT32, _POINTER, _INT32, _POINTER, _INT64, _INT32, *(_POINTER,) * 3),
    "stemma_note_draft": (None, _POINTER, _INT32, _POINTER, _INT32, _INT32),
    "stemma_describe_drafter": (None, _POINTER, _POINTER),
    "stemma_new_examples": (_POINTER, _INT32),
    "stemma_free_examples": (None, _POINTER),
    "stemma_add_example": (None, *(_POINTER,) * 3, _INT32, _INT32),
    "stemma_extend_example": (None, _POINTER, _INT64, _POINTER, _POINTER, _INT32, _INT32),
    "stemma_new_analogy": (_POINTER, *(_POINTER,) * 3, _INT32),
    "stemma_free_analogy": (None, _POINTER),
    "stemma_propose_analogies": (_INT32, *(_POINTER,) * 3, _INT32, _POINTER, _INT32),
}


@functools.cache
def library() -> ctypes.CDLL:
    """Raises BuildError."""
    return LIBRARY.load(_SIGNATURES)


if __name__ == "__main__":
    LIBRARY.report()
