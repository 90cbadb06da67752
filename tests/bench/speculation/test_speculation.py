"""The benchmark of speculation, tiny: a row a program, and one of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_thread import EngineInThread

from stemma.bench.speculation import speculation
from stemma.cli.parser import run_command


def test_each_program_is_a_row_and_all_of_them_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "Engine", EngineInThread)
    few = ["--skills", "extract,classify", "--conversations", "1", "--repeats", "1"]
    assert run_command(["bench", "speculation", *few, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("┏") == 1, "one table"
    rows = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    extraction, choice, both = rows
    assert [row["program"] for row in rows] == ["extract", "classify", "all"]
    assert both["drafted"] == extraction["drafted"] + choice["drafted"] > 0
    for side in ("off, s", "on, s"):
        assert both[side] == pytest.approx(extraction[side] + choice[side])


def test_trees_are_held_against_chains_of_the_same_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides: list[dict[str, Any]] = []

    def engine(model: Path, **options: Any) -> EngineInThread:
        sides.append(options)
        return EngineInThread(model, **options)

    monkeypatch.setattr(speculation, "Engine", engine)
    few = ["--skills", "extract", "--conversations", "1", "--repeats", "1", "--out", str(tmp_path)]
    drafts = ["--draft-model", "stemma-tiny-draft", "--draft-candidates", "2"]
    by_model = ["--speculate", "model,grammar", "--against", "model,grammar"]
    assert run_command(["bench", "speculation", *few, *drafts, *by_model]) == 0
    chains, trees = sides
    assert trees == chains | {"draft_candidates": 2}
    assert chains["draft_model"] == "stemma-tiny-draft" and "draft_candidates" not in chains
