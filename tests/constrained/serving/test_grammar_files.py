"""Compiled grammars kept in a folder between runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from waiting import ready

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving import compiler_service
from stemma.constrained.serving.compiler_service import GrammarCompiler
from stemma.constrained.serving.grammar_files import GrammarFiles, file_name
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes

DIGITS = GrammarSpec("regex", "[0-9]+")
# Takes a worker about 0.2 s.
SLOW = GrammarSpec("regex", "|".join(f"[ab]*a[ab]{{12}}x{i}" for i in range(60)))
HANG_TIMEOUT_S = 120.0


def wait(compiler: GrammarCompiler, pending: PendingGrammar) -> None:
    while not pending.is_done:
        assert ready([compiler], HANG_TIMEOUT_S)
        compiler.collect()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiler_service, "LONG_S", 0.0)  # so that all are kept
    return tmp_path / "grammars"


def compiled_by_worker(folder: Path, spec: GrammarSpec, namespace: str = "") -> bool:
    """Whether a new compiler's process was asked; the grammar works either way."""
    compiler = GrammarCompiler(single_bytes, files=GrammarFiles(folder))
    asked = []
    for lane in compiler._lanes:
        inner = lane._ask
        lane._ask = lambda job, inner=inner: asked.append(job) or inner(job)  # type: ignore[method-assign]
    try:
        pending = compiler.ask(spec, namespace)
        wait(compiler, pending)
        assert pending.bound is not None
        return bool(asked)
    finally:
        compiler.close()


def test_another_run_asks_no_process(folder: Path) -> None:
    assert compiled_by_worker(folder, DIGITS)
    assert not compiled_by_worker(folder, DIGITS)
    assert compiled_by_worker(folder, GrammarSpec("regex", "[0-9]*"))


def test_a_namespace_has_its_own(folder: Path) -> None:
    """Else time would tell what others have asked for."""
    assert compiled_by_worker(folder, DIGITS, "a")
    assert compiled_by_worker(folder, DIGITS, "b")


def test_what_is_soon_there_is_not_written(tmp_path: Path) -> None:
    compiler = GrammarCompiler(single_bytes, files=GrammarFiles(tmp_path))
    slow = compiler.ask(SLOW)
    wait(compiler, slow)
    compiler.close()
    assert len(list(tmp_path.iterdir())) == 1  # 0.2 s of CPU time


def test_a_refusal_is_not_written(folder: Path) -> None:
    compiler = GrammarCompiler(single_bytes, files=GrammarFiles(folder))
    wait(compiler, compiler.ask(GrammarSpec("regex", "(")))
    compiler.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("data", [b"", b"\x80", pickle.dumps("text")])
def test_a_damaged_file_is_made_anew(folder: Path, data: bytes) -> None:
    assert compiled_by_worker(folder, DIGITS)
    (file,) = folder.iterdir()
    file.write_bytes(data)
    assert compiled_by_worker(folder, DIGITS)
    assert not compiled_by_worker(folder, DIGITS)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Most of a file are tables: changed, they are read without an error, as another grammar."""
    files = GrammarFiles(tmp_path)
    files.put("a", pickle.dumps(compile_grammar(DIGITS)))
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    for at in range(0, len(data), 41):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert files.get("a") is None, at
    file.write_bytes(data)
    assert files.get("a") is not None


def test_what_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.grammar").mkdir()
    GrammarFiles(tmp_path).put("a", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["a.grammar"]


def test_what_a_killed_engine_was_writing_is_trimmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(1000)
    files = GrammarFiles(tmp_path, max_bytes=1500)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", _killed)
        with pytest.raises(KeyboardInterrupt):
            files.put("a", data)
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))
    files.put("b", data)
    assert [path.name for path in tmp_path.iterdir()] == ["b.grammar"]


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    data = pickle.dumps(compile_grammar(DIGITS))
    files = GrammarFiles(tmp_path, max_bytes=5 * len(data) // 2)
    for age, name in enumerate(["a", "b"]):
        files.put(name, data)
        os.utime(tmp_path / f"{name}.grammar", (age, age))
    assert files.get("a") is not None
    files.put("c", data)
    assert [files.get(name) is None for name in "abc"] == [False, True, False]


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    """Its files would decide what runs here."""
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        GrammarFiles(tmp_path / "open")


def test_a_name_is_of_all_that_a_grammar_depends_on() -> None:
    names = {
        file_name(DIGITS, "", 2.0),
        file_name(DIGITS, "tenant", 2.0),
        file_name(DIGITS, "", 3.0),
        file_name(GrammarSpec("regex", "[0-9]+", backend="llguidance"), "", 2.0),
    }
    assert len(names) == 4
