"""The wheel and the sdist hold what they should, and what they install works by itself."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import stemma
from stemma.native_library import BuildError
from stemma.runtime.speculate.native import bindings as drafting

ROOT = Path(stemma.__file__).parent
WITHOUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"
)
WITH_THE_REPOSITORY = ("docs", "examples", "tests", "deploy", ".ci")  # and so in the sdist


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, in which to build."""
    folder = tmp_path_factory.mktemp("source") / "stemma"
    shutil.copytree(ROOT, folder, ignore=WITHOUT)
    return folder


@pytest.fixture(scope="module")
def built(source: Path) -> tuple[Path, Path]:
    """The wheel, built from the sdist, and that."""
    out = source.parent / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def _files(folder: Path, *rooms: str) -> set[str]:
    """All files of these folders, by their paths below `folder`."""
    paths = (path for room in rooms for path in (folder / room).rglob("*"))
    return {path.relative_to(folder).as_posix() for path in paths if path.is_file()}


def test_the_wheel_has_all_files_of_the_package_and_nothing_else(
    source: Path, built: tuple[Path, Path]
) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    rooms = [path.parent.name for path in source.glob("*/__init__.py")]
    assert {"runtime", "kernels", "cli"} <= set(rooms) and "tests" not in rooms
    expected = _files(source, *rooms) | {path.name for path in source.glob("*.py")} | {"py.typed"}
    expected -= _files(source, "bench/results")  # measured, not run
    assert {name.removeprefix("stemma/") for name in names if name.startswith("stemma/")} == (
        expected
    )
    others = {name.partition("/")[0] for name in names} - {"stemma"}
    assert all(name.endswith(".dist-info") for name in others)


def test_the_sdist_has_docs_examples_and_tests_too(source: Path, built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        members = [member.name for member in sdist.getmembers() if member.isfile()]
    names = {name.partition("/")[2] for name in members}
    assert _files(source, *WITH_THE_REPOSITORY) <= names
    top = {path.name for path in source.iterdir() if path.is_file()}
    assert top <= names, top - names


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path]) -> Path:
    """The interpreter of a fresh environment with the wheel."""
    python = built[0].parent / "venv" / "bin" / "python"
    _install(built[0], python)
    return python


def _install(wheel: Path, python: Path) -> None:
    """Into a fresh environment, with what this environment has."""
    folder = python.parents[1]
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/*/site-packages"))
    (site / "needed.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)


def test_a_wheel_with_compiled_libraries_runs_them_where_no_compiler_is(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    library, machine = drafting.LIBRARY, platform.machine()
    try:
        here = library.path()
    except BuildError as error:
        pytest.skip(str(error))
    there = library.prebuilt_path(machine, library.instructions())
    shutil.copy(here, tmp_path / there.name)  # compiling would take long
    wheels = runpy.run_path(str(ROOT / ".ci" / "wheels.py"))
    files = wheels["prebuilt"]([library], machine, "no-such-compiler", tmp_path)
    wheel = wheels["with_libraries"](built[0], files, machine)
    _require_record(wheel)
    python = tmp_path / "venv" / "bin" / "python"
    _install(wheel, python)
    nothing = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    module = "stemma.runtime.speculate.native.bindings"
    found = _output(python, str(python), "-m", module, **nothing)
    site = next(python.parents[1].glob("lib/*/site-packages"))
    (name,) = files
    assert found == f"stemma: drafting code at {site / name}\n"


def _require_record(wheel: Path) -> None:
    """Its files are those of its RECORD, and its tag is in its name."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    (record,) = (name for name in contents if name.endswith("/RECORD"))
    recorded = {}
    for name, digest, size in csv.reader(contents[record].decode().splitlines()):
        recorded[name] = (digest, size)
    assert recorded.pop(record) == ("", "")
    for name, content in contents.items():
        if name != record:
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
            assert recorded.pop(name) == (f"sha256={digest.rstrip('=')}", str(len(content)))
    assert not recorded
    tag = wheel.stem.partition("-py3-")[2]
    described = contents[record.replace("RECORD", "WHEEL")].decode()
    assert f"Tag: py3-{tag}\n" in described and "Root-Is-Purelib: false\n" in described


def _output(installed: Path, *command: str, **environment: str) -> str:
    """Of a command outside the checkout."""
    folder = installed.parents[2]
    environment = {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_installed_imports_without_torch_and_has_its_command(installed: Path) -> None:
    code = "import stemma, sys; print(stemma.__file__, 'torch' in sys.modules)"
    found = _output(installed, str(installed), "-c", code)
    assert found == f"{next(installed.parents[1].glob('lib/*/*/stemma'))}/__init__.py False\n"
    version = _output(installed, str(installed.parent / "stemma"), "--version")
    assert version == f"stemma {stemma.__version__}\n"


def test_what_is_installed_runs_a_program_on_the_embedded_model(
    installed: Path, tmp_path: Path
) -> None:
    """With its C++, which a fresh machine compiles."""
    command = (str(installed.parent / "stemma"), "generate", "Hi, my name is Nora.")
    fresh = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "Nora" in _output(installed, *command, "--temperature", "0", **fresh)
    libraries = {path.name.partition("-")[0] for path in tmp_path.rglob("*.so")}
    assert libraries or shutil.which("g++") is None
