"""Compiling the grammar code: where it cannot be done, Python does the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stemma.constrained.grammar import Grammar, Literal
from stemma.constrained.native import bindings
from stemma.constrained.native.bindings import LIBRARY, _load, library, why_not_native
from stemma.constrained.regular.build import build_dfa


@pytest.fixture
def nothing_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _load.cache_clear()
    yield tmp_path
    _load.cache_clear()


def test_without_a_compiler_python_builds_and_the_reason_is_known(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_dfa(Grammar.of(Literal("a"))).matches(b"a")
    assert library() is None
    assert "no-such-compiler" in (why_not_native() or "")


def test_a_failed_compilation_is_one_line_and_leaves_nothing_behind(
    nothing_built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(LIBRARY, compile_flags=("--no-such-flag",))
    monkeypatch.setattr(bindings, "LIBRARY", broken)
    reason = why_not_native()
    assert reason is not None and "\n" not in reason
    assert not list(nothing_built.glob("stemma/*"))
