"""The benchmark of prompts that another engine computes: each way answers, one elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command


def test_prompts_are_computed_apart_and_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompt", "300", "--streams", "2", "--prompts", "1", "--repeats", "1", "--json"]
    assert run_command(["bench", "prefill", *flags, "--out", str(tmp_path)]) == 0
    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["apart", "together", "limited", "a core"]
    assert rows["together"]["ratio"] == rows["a core"]["first ratio"] == 1.0
    assert all(rows[way]["gap p99 ms"] > 0 for way in ("apart", "together", "limited"))
    assert 0.0 < rows["apart"]["hidden"] < 1.0
