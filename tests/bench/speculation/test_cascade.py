"""The benchmark of cascades, tiny: each model alone, and a rule whose cost is known beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_thread import EngineInThread

from stemma.bench.speculation import cascade
from stemma.cli.parser import run_command


def test_both_models_alone_and_each_rule_have_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of one model: a rule that takes everything costs what one of them costs alone,
    one that takes nothing about twice as much."""
    monkeypatch.setattr(cascade, "Engine", EngineInThread)
    rules = ["--rule", "mean_logprob(-99)", "--rule", "mean_logprob(0)"]
    few = ["bench", "cascade", "--samples", "4", *rules, "--out", str(tmp_path)]
    assert run_command(few) == 0
    rows = {row["rule"]: row for row in json.loads((tmp_path / "cascade.json").read_text())["rows"]}
    assert list(rows) == ["large alone", "small alone", "mean_logprob(-99)", "mean_logprob(0)"]
    assert rows["small alone"]["gflop"] == rows["large alone"]["gflop"]
    assert rows["mean_logprob(-99)"]["taken_percent"] == 100
    assert 0.8 < rows["mean_logprob(-99)"]["less_compute"] <= 1.1
    assert rows["mean_logprob(0)"]["less_compute"] < 0.75
    assert rows["mean_logprob(0)"]["right_percent"] == rows["large alone"]["right_percent"]
