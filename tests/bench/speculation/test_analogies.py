"""`stemma bench analogies`: what is told of new outputs, without a model."""

from __future__ import annotations

import json
from pathlib import Path

from stemma.bench.speculation.agent_tasks import agent_tasks
from stemma.cli.parser import run_command


def test_most_calls_are_told_in_time_and_most_of_those_told_are_right(tmp_path: Path) -> None:
    few = ["--history", "30", "--conversations", "10"]
    assert run_command(["bench", "analogies", *few, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "analogies.json").read_text())["rows"]
    assert row["told"] > 0.8 * row["calls"] > 0 and float(row["right"]) > 0.6


def test_tasks_before_are_others_and_both_always_the_same() -> None:
    for load in ("people", "pipeline"):
        cases, before = agent_tasks(load, 5, 7)
        assert (len(cases), len(before)) == (5, 7)
        assert not any(case.user == other.user for case in cases for other in before)
        assert (cases, before) == agent_tasks(load, 5, 7)
