"""C++ as shared libraries: those that came with the package, or compiled here once and kept in the
user's cache.

The sources use no torch and no Python header: they take plain pointers through ctypes. So a build
takes a minute at most and outlives a change of Python or torch; any C++17 compiler works. A file's
name has a hash of sources and flags, in the cache also of compiler and CPU: what is loaded was made
of the sources beside it. It imports nothing of the house.
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

__all__ = [
    "COMPILE_FLAGS",
    "CPU_ENV",
    "BuildError",
    "InstructionSet",
    "NativeLibrary",
    "WrongInstructionSet",
    "cache_folder",
    "cpu_flags",
]

COMPILE_FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-Wall", "-Wextra")
COMPILE_TIMEOUT_S = 1200.0  # beside whatever else runs


class BuildError(RuntimeError):
    """The library cannot be built or loaded here; the message says why in one line, and the
    remedy."""


class WrongInstructionSet(ValueError):
    """STEMMA_CPU names a set that this CPU has not, or none; the message says what it may be."""


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What code needs of a CPU, and what tells a compiler that it may use it."""

    name: str
    machine: str | None  # as `platform` names it; None: any
    cpu_flags: frozenset[str]  # as Linux names them
    compile_flags: tuple[str, ...]  # for all CPUs that have it


ANY_CPU = InstructionSet("any", None, frozenset(), ())
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
        """The prebuilt library, else the compiled one, built first where it is missing. Raises
        BuildError or WrongInstructionSet."""
        instructions = self.instructions()
        prebuilt = self.prebuilt_path(platform.machine(), instructions)
        if prebuilt.exists():
            return prebuilt
        flags = (*self.compile_flags, *_architecture(instructions))
        compiler = _compiler()
        cpu = (compiler, platform.machine(), sorted(cpu_flags()), _modified(compiler))
        path = cache_folder() / f"{self.name}-{self._key(flags, *cpu)}.so"
        if not path.exists():
            self.compile(compiler, flags, path)
        return path

    def origin(self) -> str:
        """Where the library comes from, for people. Raises as `instructions`."""
        path = self.prebuilt_path(platform.machine(), self.instructions())
        return "prebuilt" if path.exists() else "compiled here"

    def instructions(self) -> InstructionSet:
        """The set that is used.

        Raises:
            BuildError: the CPU has none of them.
            WrongInstructionSet: STEMMA_CPU names one that it has not, or none.
        """
        have = cpu_flags()
        usable = [each for each in self.instruction_sets if each.cpu_flags <= have]
        named = os.environ.get(CPU_ENV)
        if named and ANY_CPU not in self.instruction_sets:
            usable = [each for each in usable if each.name == named]
            if not usable:
                raise WrongInstructionSet(
                    f"{CPU_ENV}={named!r} is not allowed; allowed: {self._allowed(have)}"
                )
        if not usable:
            raise BuildError(f"the CPU has not {self._lacking(have)}")
        return usable[0]

    def prebuilt_path(self, machine: str, instructions: InstructionSet) -> Path:
        """Where the package has the library for these CPUs of a machine, if it came with any."""
        key = self._key((*self.compile_flags, *instructions.compile_flags))
        name = f"{self.name}-{machine}-{instructions.name}-{key}.so"
        return self.sources.with_name("prebuilt") / name

    def prebuild(self, compiler: str, machine: str, instructions: InstructionSet, to: Path) -> Path:
        """Compile for all such CPUs of a machine, into the folder `to`, unless it is there. Raises
        BuildError."""
        path = to / self.prebuilt_path(machine, instructions).name
        if not path.exists():
            self.compile(compiler, (*self.compile_flags, *instructions.compile_flags), path)
        return path

    def load(self, signatures: Mapping[str, tuple[Any, ...]]) -> ctypes.CDLL:
        """The library in this process, built first where it is missing.

        Signatures: a function's result, then its arguments, by its name. Raises BuildError or
        WrongInstructionSet.
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
        except (BuildError, WrongInstructionSet) as error:
            print(f"stemma: no compiled {self.title}: {error}")

    def compile(self, compiler: str, flags: tuple[str, ...], path: Path) -> None:
        """Write to a name of its own, then rename: others never load half a file. Raises
        BuildError."""
        print(f"stemma: compiling {self.title} (once, up to a minute)", file=sys.stderr)
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

    def _key(self, *parts: object) -> str:
        digest = hashlib.sha256(repr(parts).encode())
        for source in sorted(self.sources.iterdir()):
            digest.update(source.name.encode() + source.read_bytes())
        return digest.hexdigest()[:16]

    def _allowed(self, have: frozenset[str]) -> str:
        """What STEMMA_CPU may be on a CPU with these flags."""
        names = [each.name for each in self.instruction_sets if each.cpu_flags <= have]
        lacking = self._lacking(have)
        return f"unset, or what this CPU has: {', '.join(names) or 'none'}; it has not {lacking}"

    def _lacking(self, have: frozenset[str]) -> str:
        """The sets that a CPU with these flags has not, and why."""
        return ", nor ".join(
            f"{each.name} (no {', '.join(sorted(lacks))})"
            for each in self.instruction_sets
            if (lacks := each.cpu_flags - have)
        )


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
        remedy = "CXX names another compiler of C++17"
        raise BuildError(f"{compiler} failed ({remedy}): {first.strip()[:300]}")


def _architecture(instructions: InstructionSet) -> tuple[str, ...]:
    """Compiled here for here, code may use all that the CPU has, unless less was asked for."""
    is_named = os.environ.get(CPU_ENV) == instructions.name
    return instructions.compile_flags if is_named else ("-march=native",)


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(
        f"no C++ compiler ({named or 'g++, clang++ or c++'}) is installed; install one, or the "
        "wheel for this machine, which needs none"
    )


def _modified(compiler: str) -> int:
    return Path(compiler).resolve().stat().st_mtime_ns


def cache_folder() -> Path:
    """Where this user's compiled libraries are."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stemma"
