"""The benchmark of speculation, tiny: a row a program, and one of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command


def test_each_program_is_a_row_and_all_of_them_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--skills", "extract,classify", "--conversations", "1", "--repeats", "1"]
    assert run_command(["bench", "speculation", *few, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("┏") == 1, "one table"
    rows = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    extraction, choice, both = rows
    assert [row["program"] for row in rows] == ["extract", "classify", "all"]
    assert both["drafted"] == extraction["drafted"] + choice["drafted"] > 0
    for side in ("off, s", "on, s"):
        assert both[side] == pytest.approx(extraction[side] + choice[side])
