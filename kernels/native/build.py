"""The C++ of `src/`, compiled for this CPU at first use.

`python -m stemma.kernels.native.build` builds ahead of time.
"""

from __future__ import annotations

from pathlib import Path

from ...native_library import NativeLibrary

SOURCES = Path(__file__).parent / "src"
NEEDED_CPU_FLAGS = frozenset(
    {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_bf16", "avx512_vnni"}
)
# No -ffast-math: infinities and NaN mean something here. No contraction: what one instance of a
# template fuses and another does not would round differently. GCC warns of its own intrinsics'
# headers.
COMPILE_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=off", "-shared",
    "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip


def kernels_library() -> NativeLibrary:
    """The library to compile, and its requirements."""
    return NativeLibrary("kernels", "CPU kernels", SOURCES, COMPILE_FLAGS, NEEDED_CPU_FLAGS)


if __name__ == "__main__":
    kernels_library().report()
