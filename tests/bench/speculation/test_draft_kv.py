"""The benchmark of a draft's KV, tiny: where prefixes are, and what is guessed behind them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.speculation import draft_kv
from stemma.cli.parser import run_command
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


def test_a_model_that_is_its_own_draft_is_as_good_behind_any_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_kv, "configure_threads", lambda *_: None)  # torch is loaded
    few = ["bench", "draft-kv", "--prompts", "2"]
    itself = ["--draft-model", str(EMBEDDED_MODEL), "--tokens", "12", "--out", str(tmp_path)]
    assert run_command([*few, *itself]) == 0
    rows = json.loads((tmp_path / "draft-kv.json").read_text())["rows"]
    computed, pool, host, files = rows
    assert computed["cached_tokens"] < 100 and pool["cached_tokens"] > 1000
    assert host["host_tokens"] > 500 and files["disk_tokens"] > 500
    for row in rows:
        assert row["guessed"] > 0 and row["right_percent"] == 100.0, row
