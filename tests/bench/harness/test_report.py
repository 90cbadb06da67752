"""Tables are whole wherever they go: a pipe, a file, a narrow terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import stemma
from stemma.bench.harness.report import print_table, write_report
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

ROOT = Path(stemma.__file__).parent
NAMES = [f"median of page {number} [of its kind], tokens per second" for number in range(8)]
ROW = {name: 100_000.0 + number for number, name in enumerate(NAMES)}
TITLE = "a title that is longer than the table below it, by far"
WRITE = f"""
from stemma.bench.harness.report import print_table
print_table({TITLE!r}, [{{"n": 1}}])
print_table("wide", [{ROW!r}])
"""


def require_whole(text: str) -> None:
    """All of the tables, a line a row."""
    assert "…" not in text and TITLE in text.splitlines()
    heads = next(line for line in text.splitlines() if NAMES[0] in line)
    figures = next(line for line in text.splitlines() if "100,000" in line)
    assert all(name in heads for name in NAMES), text
    assert all(f"{value:,.0f}" in figures for value in ROW.values()), text


def test_a_table_is_whole_through_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITE], capture_output=True, text=True, check=True, env=_narrow()
    )
    require_whole(done.stdout)


def test_a_table_is_whole_on_a_narrow_terminal() -> None:
    """Which breaks the lines itself."""
    parent, child = pty.openpty()
    environment = {**_narrow(), "NO_COLOR": "1", "TERM": "dumb"}
    with subprocess.Popen([sys.executable, "-c", WRITE], stdout=child, env=environment):
        os.close(child)
        written = _read_all(parent)
    os.close(parent)
    require_whole(written.replace("\r\n", "\n"))


def test_a_report_is_whole_through_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    args = Namespace(json=False, out=tmp_path)
    write_report("wide", [ROW], args)
    print_table(TITLE, [{"n": 1}])
    require_whole(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["plan", "--device", "h100", "--clients", "1", "64"],
            ["TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "output tokens/s", "bound by"],
        ),
        (
            ["doctor", str(EMBEDDED_MODEL)],
            ["quantization", "tokens of KV", "requests of 2,048 tokens", "fits"],
        ),
    ],
)
def test_a_commands_tables_are_whole_through_a_pipe(command: list[str], words: list[str]) -> None:
    full = [sys.executable, "-m", "stemma", *command]
    done = subprocess.run(full, capture_output=True, text=True, check=True, env=_narrow())
    assert "…" not in done.stdout
    heads = [line for line in done.stdout.splitlines() if line.startswith("┃")]
    assert all(any(word in line for line in heads) for word in words), done.stdout


def test_every_table_is_written_here() -> None:
    """So that all of them are whole."""
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    makers = [
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in room.rglob("*.py")
        if "rich.table" in path.read_text("utf-8")
    ]
    assert makers == ["bench/harness/report.py"]


def _narrow() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "20"}


def _read_all(descriptor: int) -> str:
    read = b""
    while True:
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # Linux's way to say that nobody writes any more
            return read.decode()
        if not data:
            return read.decode()
        read += data
