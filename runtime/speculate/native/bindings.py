"""The compiled library in this process, loaded once."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ....native_library import BuildError
from .build import drafting_library

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
}


def library() -> ctypes.CDLL:
    """Raises BuildError where it cannot be built or loaded."""
    loaded = _load()
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def why_not_native() -> str | None:
    """None where the compiled code runs on this machine, else the reason why not."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def _load() -> ctypes.CDLL | str:
    try:
        loaded = ctypes.CDLL(str(drafting_library().path()))
    except (BuildError, OSError) as error:
        return str(error)
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
