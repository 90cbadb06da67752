"""The C++ of `src/` in this process, loaded once.

`python -m stemma.constrained.native.bindings` compiles it ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

from ...native_library import BuildError, NativeLibrary

LIBRARY = NativeLibrary("grammars", "grammar code", Path(__file__).parent / "src")
_POINTER, _INT64, _INT32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
# Result, then arguments, by function name.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "stemma_build_automaton": (_POINTER, _POINTER, *(_INT64,) * 3, ctypes.c_double, _POINTER),
    "stemma_automaton_sizes": (None, _POINTER, _POINTER),
    "stemma_copy_automaton": (None, *(_POINTER,) * 4),
    "stemma_free_automaton": (None, _POINTER),
    "stemma_lazy_automaton": (_POINTER, _POINTER, *(_INT64,) * 3, ctypes.c_double, _POINTER),
    "stemma_free_lazy_automaton": (None, _POINTER),
    "stemma_lazy_limits": (None, _POINTER, _INT64, _INT64),
    "stemma_lazy_table": (_POINTER, _POINTER),
    "stemma_lazy_start": (_INT32, _POINTER),
    "stemma_lazy_step": (_INT32, _POINTER, _INT32, ctypes.c_char_p, _INT64),
    "stemma_lazy_accepts": (_INT32, _POINTER, _INT32),
    "stemma_lazy_exit": (_INT32, _POINTER, _INT32),
    "stemma_lazy_keep": (_INT32, _POINTER, _POINTER, _INT64),
    "stemma_lazy_sizes": (None, _POINTER, _POINTER),
    "stemma_build_trie": (_INT64, ctypes.c_char_p, _POINTER, _INT64, *(_POINTER,) * 5),
    "stemma_note_subtrees": (None, _POINTER, _INT64, _POINTER),
    "stemma_next_bytes": (None, _POINTER, ctypes.c_int32, _POINTER),
    "stemma_token_mask": (_INT64, _POINTER, _POINTER, ctypes.c_int32, _POINTER, _POINTER),
    "stemma_tokens_among": (_INT64, _POINTER, _INT64, *(_POINTER,) * 3),
    "stemma_mask_of_run": (None, _POINTER, _POINTER, _POINTER),
    "stemma_token_mask_beyond": (
        None,
        _POINTER,
        _POINTER,
        ctypes.c_int32,
        _POINTER,
        _POINTER,
        _POINTER,
    ),
}


def library() -> ctypes.CDLL | None:
    """None where it cannot be built: `why_not_native` gives the reason."""
    loaded = _load()
    return None if isinstance(loaded, str) else loaded


def why_not_native() -> str | None:
    """None where the compiled code runs on this machine, else the reason why not."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def _load() -> ctypes.CDLL | str:
    try:
        return LIBRARY.load(_SIGNATURES)
    except BuildError as error:
        return str(error)


if __name__ == "__main__":
    LIBRARY.report()
