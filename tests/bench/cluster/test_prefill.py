"""The benchmark of prompts that another engine computes: each way answers, one elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command


def test_prompts_are_computed_apart_and_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix = ["--prompt", "1200", "--chats", "4", "--answer", "8", "--prompts", "1", "--seconds", "1"]
    flags = [*mix, "--repeats", "1", "--json", "--out", str(tmp_path)]
    assert run_command(["bench", "prefill", *flags]) == 0
    rows = {row["way"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["apart", "together", "limited", "a core"]
    assert rows["together"]["ratio"] == 1.0 and rows["a core"]["first ratio"] < 1.0
    for way in ("apart", "together", "limited"):
        assert rows[way]["chats"] == 4 and rows[way]["TPOT p99 ms"] > 0 < rows[way]["long first ms"]
    assert 0.0 < rows["apart"]["hidden"] < 1.0 and rows["apart"]["layer ms"] > 0.0
