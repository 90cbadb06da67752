"""The router's benchmark runs over real sockets, and says what each load cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.cluster.router import LOADS, TARGET_US
from stemma.cli.parser import run_command


def test_each_load_is_held_against_a_bare_hop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--calls", "60", "--repeats", "1", "--json", "--out", str(tmp_path)]
    assert run_command(["bench", "router", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["load"] for row in rows] == [load.name for load in LOADS]
    assert all(row["cpu_us"] > row["hop_us"] > 0 and row["calls/s"] > 0 for row in rows)
    assert {row["target_us"] for row in rows} == {TARGET_US}
    assert json.loads((tmp_path / "router.json").read_text())["rows"] == rows
