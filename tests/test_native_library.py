"""C++ in this process: what its functions take and give, and why it is not there."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stemma.native_library import BuildError, NativeLibrary

SOURCE = 'extern "C" double half(double of) { return of / 2; }\n'


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> NativeLibrary:
    """A library of one function, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "half.cpp").write_text(SOURCE)
    library = NativeLibrary("halves", "code that halves", tmp_path / "src")
    try:
        library.path()
    except BuildError as error:
        pytest.skip(str(error))
    return library


def test_a_loaded_function_takes_and_gives_what_its_signature_says(halves: NativeLibrary) -> None:
    loaded = halves.load({"half": (ctypes.c_double, ctypes.c_double)})
    assert loaded.half(5) == 2.5


def test_a_file_that_does_not_load_is_refused_as_what_cannot_be_built_is(
    halves: NativeLibrary,
) -> None:
    halves.path().write_bytes(b"no library")
    with pytest.raises(BuildError, match="cannot load the compiled code that halves"):
        halves.load({})


def test_a_prebuilt_library_runs_without_a_compiler_while_the_sources_are_those_it_is_made_of(
    halves: NativeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = halves.path() and shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        pytest.skip("another compiler than g++")
    assert halves.origin() == "compiled here"
    machine, folder = platform.machine(), tmp_path / "prebuilt"
    prebuilt = halves.prebuild(compiler, machine, halves.instructions(), folder)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert halves.path() == prebuilt and halves.origin() == "prebuilt"
    assert halves.load({"half": (ctypes.c_double, ctypes.c_double)}).half(3) == 1.5
    (halves.sources / "half.cpp").write_text(SOURCE + "// changed\n")
    with pytest.raises(BuildError, match="no-such-compiler"):
        halves.path()


@pytest.mark.parametrize("room", ["kernels", "constrained", "runtime.speculate"])
def test_each_library_is_compiled_ahead_of_time_or_says_why_not(room: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"stemma.{room}.native.bindings"]
    environment = {"CXX": "no-such-compiler", "HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("stemma: no compiled ") and not done.stderr
