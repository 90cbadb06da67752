"""The DSL's benchmark runs, and says what it measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stemma.cli.parser import run_command


def test_each_unit_gets_a_time_and_its_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--no-engine", "--programs", "30", "--ops", "30", "--repeats", "2", "--json"]
    assert run_command(["bench", "dsl", *flags, "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["unit"], row["number"], row["target_us"]) for row in rows] == [
        ("a program of one gen", 30, 30.0),
        ("a text", 30, 10.0),
        ("a gen", 30, 10.0),
    ]
    assert all(0 < row["cpu_us_min"] <= row["cpu_us_median"] for row in rows)
    assert json.loads((tmp_path / "dsl.json").read_text())["rows"] == rows


def test_a_folder_without_sglang_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))  # gone after this test
    flags = ["--no-engine", "--programs", "1", "--ops", "1", "--repeats", "1"]
    paths = ["--sglang", str(tmp_path), "--out", str(tmp_path)]
    assert run_command(["bench", "dsl", *flags, *paths]) == 1
    assert "a folder with SGLang's package" in capsys.readouterr().err
