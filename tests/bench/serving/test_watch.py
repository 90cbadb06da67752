"""`stemma bench watch`: a row a tree, a row a size of steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command
from stemma.runtime.gateway.observe.tree_view import MAX_NODES


def bench(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> list[dict[str, float]]:
    command = ["bench", "watch", "--json", "--out", str(folder), "--repeats", "3", *flags]
    assert run_command(command) == 0
    rows: list[dict[str, float]] = json.loads(capsys.readouterr().out)
    return rows


def test_bench_watch_prints_a_row_a_tree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = bench(capsys, tmp_path, "--nodes", "50", str(MAX_NODES + 500))
    assert [row["nodes"] >= num for row, num in zip(rows, (50, MAX_NODES + 500))] == [True, True]
    assert all(0 < row["changed"] <= row["nodes"] for row in rows)
    assert all(row["look_ms"] > 0 and row["first_kB"] > row["kB"] > 0 for row in rows)


def test_bench_watch_tells_what_a_step_pays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = bench(capsys, tmp_path, "--steps", "1", "4")
    assert [row["rows"] for row in rows] == [1, 4]
    assert all(row["off_us"] < row["on_us"] for row in rows)
