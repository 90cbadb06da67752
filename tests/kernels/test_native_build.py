"""Compiling the C++ kernels: where it cannot be done, torch calls run, with the reason shown."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stemma import native_library
from stemma.errors import InvalidRequest
from stemma.kernels.native import bindings
from stemma.kernels.native.bindings import (
    INSTRUCTION_SETS,
    LIBRARY,
    library,
    library_without_threads,
    why_not_native,
)
from stemma.kernels.registry import select_kernels
from stemma.native_library import InstructionSet
from stemma.runtime.execute.model_runner import resolve_dtype, why_slow


def _of(name: str) -> InstructionSet:
    (found,) = (each for each in INSTRUCTION_SETS if each.name == name)
    return found


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache on a CPU that has the instructions, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "cpu_flags", lambda: INSTRUCTION_SETS[0].cpu_flags)
    library.cache_clear()
    library_without_threads.cache_clear()
    why_not_native.cache_clear()
    yield tmp_path
    library.cache_clear()
    library_without_threads.cache_clear()
    why_not_native.cache_clear()


def test_without_a_compiler_torch_calls_run_and_the_reason_is_shown(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    choices = select_kernels(torch.bfloat16).describe()
    attention = next(c for c in choices if c.op == "paged_attention")
    assert attention.implementation == "cpu" and "no-such-compiler" in attention.reason


def test_a_cpu_without_the_instructions_is_refused_by_name(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "cpu_flags", lambda: frozenset({"avx512f"}))
    reason = why_not_native(torch.bfloat16)
    assert reason is not None
    assert all(part in reason for part in ("avx512 (no", "avx512_bf16", "avx2 (no", "neon (no"))


@pytest.mark.parametrize(
    ("flag", "name"),
    [("avx512_bf16", "avx512_vnni"), ("avx512_vnni", "avx512f"), ("avx512dq", "avx2")],
)
def test_a_cpu_that_lacks_one_instruction_has_the_next_set(
    monkeypatch: pytest.MonkeyPatch, flag: str, name: str
) -> None:
    flags = frozenset().union(*(each.cpu_flags for each in INSTRUCTION_SETS)) - {flag}
    monkeypatch.setattr(native_library, "cpu_flags", lambda: flags)
    assert LIBRARY.instructions().name == name


@pytest.mark.parametrize("has", [(), ("vbmi",), ("vbmi", "vnni"), ("vnni", "bf16")])
def test_the_sources_compile_for_whatever_of_avx512_a_cpu_has(
    tmp_path: Path, has: tuple[str, ...]
) -> None:
    """As `-march=native` names it to the compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64")
    options = ["-std=c++17", "-fsyntax-only", "-march=x86-64-v4", *(f"-mavx512{x}" for x in has)]
    source = tmp_path / "source.cpp"
    source.write_text(f'#include "{LIBRARY.sources / "attention.cpp"}"\n')
    subprocess.run([compiler, *options, str(source)], check=True)


def test_a_later_set_can_be_asked_for_by_name(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, *later, _ = INSTRUCTION_SETS
    flags = best.cpu_flags.union(*(each.cpu_flags for each in later))
    monkeypatch.setattr(native_library, "cpu_flags", lambda: flags)
    assert LIBRARY.instructions() is best
    for each in later:
        monkeypatch.setenv("STEMMA_CPU", each.name)
        assert LIBRARY.instructions() is each
    monkeypatch.setenv("STEMMA_CPU", "")
    assert LIBRARY.instructions() is best


@pytest.mark.parametrize("named", ["sse", "avx512"])
def test_a_set_that_the_cpu_has_not_is_refused_with_those_that_it_has(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(native_library, "cpu_flags", lambda: _of("avx2").cpu_flags)
    monkeypatch.setenv("STEMMA_CPU", named)
    for dtype in ("auto", "float32"):
        with pytest.raises(InvalidRequest, match=f"STEMMA_CPU='{named}'.*has: avx2; .*avx512 "):
            select_kernels(resolve_dtype(dtype))


def test_an_engine_says_that_torch_calls_run_unless_they_were_asked_for(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    said = why_slow("auto", "cpu", "auto")
    assert said is not None and "no-such-compiler" in said and "install one" in said
    assert why_slow("auto", "cpu", "cpu") is None
    assert why_slow("float32", "cpu", "auto") is None


def test_a_failed_compilation_is_one_line_and_leaves_nothing_behind(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(LIBRARY, compile_flags=("--no-such-flag",))
    monkeypatch.setattr(bindings, "LIBRARY", broken)
    reason = why_not_native(torch.bfloat16)
    assert reason is not None and "failed" in reason and "\n" not in reason
    assert not list((empty_cache / "stemma").iterdir())
