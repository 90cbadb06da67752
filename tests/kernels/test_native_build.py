"""Compiling the C++ kernels: where it cannot be done, torch calls run, with the reason shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stemma import native_library
from stemma.kernels.native import bindings
from stemma.kernels.native.bindings import LIBRARY, library, why_not_native
from stemma.kernels.registry import select_kernels


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache on a CPU that has the instructions, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "cpu_flags", lambda: LIBRARY.needed_cpu_flags)
    library.cache_clear()
    why_not_native.cache_clear()
    yield tmp_path
    library.cache_clear()
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
    assert reason is not None and "avx512_bf16" in reason


@pytest.mark.parametrize("flag", ["avx512_bf16", "avx512_vnni"])
def test_a_cpu_that_lacks_one_instruction_set_is_refused_by_name(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(native_library, "cpu_flags", lambda: LIBRARY.needed_cpu_flags - {flag})
    reason = why_not_native(torch.bfloat16)
    assert reason is not None and reason.endswith(flag)


def test_a_failed_compilation_is_one_line_and_leaves_nothing_behind(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(LIBRARY, compile_flags=("--no-such-flag",))
    monkeypatch.setattr(bindings, "LIBRARY", broken)
    reason = why_not_native(torch.bfloat16)
    assert reason is not None and "failed" in reason and "\n" not in reason
    assert not list((empty_cache / "stemma").iterdir())
