"""`stemma bench ahead`: agents with tools, with work ahead and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_thread import EngineInThread

from stemma.bench.speculation import ahead
from stemma.cli.parser import run_command


def test_both_engines_say_the_same_and_all_calls_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "Engine", EngineInThread)
    few = ["--conversations", "2", "--tool-s", "0.01", "--repeats", "1", "--num-threads", "1"]
    exact = ["--dtype", "float64", "--kernels", "reference", "--observed-words", "8"]
    exact += ["--history", "1", "--load", "pipeline"]
    assert run_command(["bench", "ahead", *few, *exact, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "ahead.json").read_text())["rows"]
    assert [row["round"] for row in rows] == ["new tasks", "again"]
    assert all(row["same texts"] == 1 and row["used"] <= row["early"] for row in rows)
    assert all(row["tool calls"] > 0 for row in rows)
