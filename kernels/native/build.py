"""Compiles the C++ of `src/` for this CPU, once, and keeps the library in the user's cache.

The sources use no torch header: they take plain pointers through ctypes. So a build takes seconds,
not the minute of a torch extension, and it outlives a change of torch. The file's name is a hash of
sources, flags, compiler and CPU. `python -m stemma.kernels.native.build` builds ahead of time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
NEEDED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
# No -ffast-math: infinities and NaN mean something here. GCC warns of its own intrinsics' headers.
COMPILE_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread",
    "-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
COMPILE_TIMEOUT_S = 300.0


class BuildError(RuntimeError):
    """The kernels cannot be built here; the message says why in one line."""


def library_path() -> Path:
    """The compiled library, built first where it is missing. Raises BuildError."""
    missing = sorted(NEEDED_CPU_FLAGS - _cpu_flags())
    if missing:
        raise BuildError(f"the CPU has no {', '.join(missing)}")
    compiler = _compiler()
    path = _cache_folder() / f"kernels-{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    return path


def _compile(compiler: str, path: Path) -> None:
    """Write to a name of its own, then rename: others never load half a file."""
    print("stemma: compiling CPU kernels (once, a few seconds)", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            target = Path(folder) / path.name
            sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
            command = [compiler, *COMPILE_FLAGS, *sources, "-o", str(target)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
            if done.returncode:
                first = next((s for s in done.stderr.splitlines() if "error" in s), done.stderr)
                raise BuildError(f"{compiler} failed: {first.strip()[:300]}")
            target.replace(path)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"cannot build with {compiler}: {error}") from error


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({named or 'g++, clang++ or c++'}) is installed")


def _key(compiler: str) -> str:
    digest = hashlib.sha256(repr((COMPILE_FLAGS, compiler, sorted(_cpu_flags()))).encode())
    digest.update(str(Path(compiler).resolve().stat().st_mtime_ns).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> frozenset[str]:
    """Of the first processor; none where the system does not list them."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stemma"


if __name__ == "__main__":
    try:
        print(f"stemma: CPU kernels at {library_path()}")
    except BuildError as error:
        print(f"stemma: no compiled CPU kernels: {error}")
