"""The benchmark of roles: a row for each way to use the engines and each limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command


def test_each_way_is_held_against_engines_that_do_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--engines", "2", "--mix", "rag", "--seconds", "2", "--tpot-ms", "15", "--json"]
    assert run_command(["bench", "roles", *flags, "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    names = ["together", "together, steps of 512", "1 prefill, 1 decode"]
    assert [row["engines"] for row in rows] == names
    both, chunked, apart = rows
    assert max(both["ratio"], chunked["ratio"]) == 1.0 and apart["calls/s"] > 0
    assert both["elsewhere"] is both["busy, prefill"] is None
    assert 0 < apart["elsewhere"] <= 1 and 0 < apart["hidden"] < 1
    report = json.loads((tmp_path / "roles.json").read_text())
    assert report["machine"]["stemma"] and report["device"] == "h100" and report["rows"] == rows
