"""The benchmark of a draft's KV, tiny: where prefixes are, and what is guessed behind them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from stemma.runtime.checkpoint.location import EMBEDDED_MODEL


def test_a_model_that_is_its_own_draft_is_as_good_behind_any_prefix(tmp_path: Path) -> None:
    few = [sys.executable, "-P", "-m", "stemma", "bench", "draft-kv", "--prompts", "2"]
    itself = ["--draft-model", str(EMBEDDED_MODEL), "--tokens", "12", "--out", str(tmp_path)]
    subprocess.run([*few, *itself], check=True, capture_output=True)
    rows = json.loads((tmp_path / "draft-kv.json").read_text())["rows"]
    computed, pool, host, files = rows
    assert computed["cached_tokens"] < 100 and pool["cached_tokens"] > 1000
    assert host["host_tokens"] > 500 and files["disk_tokens"] > 500
    for row in rows:
        assert row["guessed"] > 0 and row["right_percent"] == 100.0, row
