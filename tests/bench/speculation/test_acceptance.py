"""The benchmark of acceptance, tiny: a draft that is the model, and one that is nearly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.speculation import acceptance
from stemma.cli.parser import run_command


def test_coupled_draws_agree_as_often_as_the_bound_says_and_a_model_with_itself_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptance, "configure_threads", lambda *_: None)  # torch is loaded
    few = ["bench", "acceptance", "--conversations", "1", "--places", "40"]
    drafts = ["--draft", "6", "--draft", "5", "--temperature", "1", "--out", str(tmp_path)]
    assert run_command([*few, *drafts, "--seeds", "4"]) == 0
    rows = json.loads((tmp_path / "acceptance.json").read_text())["rows"]
    for row in rows:
        rejection, coupled = row["rejection_percent"], row["coupled_percent"]
        if row["draft"] == "6":
            assert rejection == coupled == row["bound_percent"] == 100.0
            continue
        assert row["bound_percent"] <= rejection
        assert row["bound_percent"] - 12 < coupled  # of some 160 draws
    assert min(row["coupled_percent"] for row in rows if row["draft"] == "5") < 99
