"""The benchmark of ways between two engines: each brings all that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command


def test_each_transport_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--mib", "1", "--repeats", "1", "--json", "--out", str(tmp_path)]
    assert run_command(["bench", "kv-transport", *flags]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [row["transport"] for row in rows if row["transport"] != "NIXL"]
    assert names == ["shared memory", "ZeroMQ, ipc", "ZeroMQ, tcp"]
    assert all(row["MiB"] == 1 and row["ms"] > 0 for row in rows)
