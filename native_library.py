"""Compiles C++ sources for this machine, once, and keeps the library in the user's cache.

The sources use no torch and no Python header: they take plain pointers through ctypes. So a build
takes seconds and outlives a change of Python or torch. The file's name is a hash of sources, flags,
compiler and CPU; any C++17 compiler works. It imports nothing of the house.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["COMPILE_FLAGS", "BuildError", "InstructionSet", "NativeLibrary", "cpu_flags"]

COMPILE_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra")
COMPILE_TIMEOUT_S = 1200.0  # beside whatever else runs


class BuildError(RuntimeError):
    """The library cannot be built or loaded here; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What code needs of a CPU, and what tells a compiler that it may use it."""

    name: str
    cpu_flags: frozenset[str]  # as Linux names them
    compile_flags: tuple[str, ...]  # where it was asked for by name


ANY_CPU = InstructionSet("any", frozenset(), ("-march=native",))
CPU_ENV = "STEMMA_CPU"


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """All *.cpp files of a folder as one shared library, for the first of its instruction sets that
    this CPU has; STEMMA_CPU names a later one."""

    name: str  # of the file
    title: str  # for people
    sources: Path
    compile_flags: tuple[str, ...] = COMPILE_FLAGS
    instruction_sets: tuple[InstructionSet, ...] = (ANY_CPU,)

    def path(self) -> Path:
        """The compiled library, built first where it is missing. Raises BuildError."""
        instructions = self.instructions()
        flags = (*self.compile_flags, *_architecture(instructions))
        compiler = _compiler()
        path = _cache_folder() / f"{self.name}-{self._key(compiler, flags)}.so"
        if not path.exists():
            self._compile(compiler, flags, path)
        return path

    def instructions(self) -> InstructionSet:
        """The set that is used. Raises BuildError."""
        named, have = os.environ.get(CPU_ENV) or None, cpu_flags()
        sets = [
            each for each in self.instruction_sets if each is ANY_CPU or named in (None, each.name)
        ]
        for each in sets:
            if each.cpu_flags <= have:
                return each
        if not sets:
            names = ", ".join(each.name for each in self.instruction_sets)
            raise BuildError(f"{CPU_ENV}={named} is none of {names}")
        lacks = [f"{each.name} (no {', '.join(sorted(each.cpu_flags - have))})" for each in sets]
        raise BuildError(f"the CPU has not {', nor '.join(lacks)}")

    def load(self, signatures: Mapping[str, tuple[Any, ...]]) -> ctypes.CDLL:
        """The library in this process, built first where it is missing.

        Signatures: a function's result, then its arguments, by its name. Raises BuildError.
        """
        try:
            loaded = ctypes.CDLL(str(self.path()))
        except OSError as error:
            raise BuildError(f"cannot load the compiled {self.title}: {error}") from error
        for name, (result, *arguments) in signatures.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        return loaded

    def report(self) -> None:
        """Print where the library is, built first where it is missing, or why there is none."""
        try:
            print(f"stemma: {self.title} at {self.path()}")
        except BuildError as error:
            print(f"stemma: no compiled {self.title}: {error}")

    def _compile(self, compiler: str, flags: tuple[str, ...], path: Path) -> None:
        """Write to a name of its own, then rename: others never load half a file."""
        print(f"stemma: compiling {self.title} (once, a few seconds)", file=sys.stderr)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                target = Path(folder) / path.name
                objects = {
                    source: target.with_name(f"{source.stem}.o")
                    for source in sorted(self.sources.glob("*.cpp"))
                }
                units = [
                    (*flags, "-c", str(source), "-o", str(to)) for source, to in objects.items()
                ]
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    list(pool.map(functools.partial(_run, compiler), units))
                _run(compiler, (*flags, *map(str, objects.values()), "-o", str(target)))
                target.replace(path)
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildError(f"cannot build with {compiler}: {error}") from error

    def _key(self, compiler: str, flags: tuple[str, ...]) -> str:
        parts = (flags, compiler, platform.machine(), sorted(cpu_flags()))
        digest = hashlib.sha256(repr(parts).encode())
        digest.update(str(Path(compiler).resolve().stat().st_mtime_ns).encode())
        for source in sorted(self.sources.iterdir()):
            digest.update(source.name.encode() + source.read_bytes())
        return digest.hexdigest()[:16]


def cpu_flags() -> frozenset[str]:
    """Of the first processor, as Linux names them; none where the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def _run(compiler: str, arguments: tuple[str, ...]) -> None:
    """Raises BuildError with the first error, OSError and SubprocessError."""
    done = subprocess.run(
        [compiler, *arguments],
        capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        first = next((s for s in done.stderr.splitlines() if "error" in s), done.stderr)
        raise BuildError(f"{compiler} failed: {first.strip()[:300]}")


def _architecture(instructions: InstructionSet) -> tuple[str, ...]:
    """Compiled here for here, code may use all that the CPU has, unless less was asked for."""
    return instructions.compile_flags if os.environ.get(CPU_ENV) else ("-march=native",)


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({named or 'g++, clang++ or c++'}) is installed")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stemma"
