"""The C++ of `src/`, compiled for this CPU at first use, or ahead of time by `make`; any C++17
compiler works.
"""

from __future__ import annotations

from pathlib import Path

from ....native_library import NativeLibrary

SOURCES = Path(__file__).parent / "src"
COMPILE_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-Wall", "-Wextra",
)  # fmt: skip


def drafting_library() -> NativeLibrary:
    """The library and its sources."""
    return NativeLibrary("drafting", "drafting code", SOURCES, COMPILE_FLAGS)
