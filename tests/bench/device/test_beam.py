"""The benchmark of beam search, tiny: the two ways of searching find the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.device import beam
from stemma.cli.parser import run_command


def test_one_output_and_both_ways_of_searching_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beam, "configure_threads", lambda *_: None)  # torch is loaded
    few = ["--prompt-tokens", "20", "--output-tokens", "4", "--rounds", "2"]
    arguments = ["bench", "beam", "--beams", "1", "3", "3", *few]
    assert run_command([*arguments, "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in rows] == [
        "one output",
        "beam, k = 1",
        "resubmit, k = 1",
        "beam, k = 3",
        "resubmit, k = 3",
    ]
    assert all(row["time, s"] > 0 for row in rows)
    assert sum(row["other outputs"] for row in rows) == 0
