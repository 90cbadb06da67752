"""The benchmark of whole replicas: each way of placing does the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.cli.parser import run_command


def test_each_way_answers_all_and_finds_what_is_shared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = ["round robin, a program", "one engine"]
    flags = ["--load", "documents", "--conversations", "8", "--repeats", "1", "--json"]
    flags += [word for way in ways for word in ("--way", way)]
    assert run_command(["bench", "replicas", *flags, "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in rows] == ways and rows[0]["ratio"] == 1.0
    assert len({row["prompt tokens"] for row in rows}) == 1, "not the same work"
    assert all(0.2 < row["hit rate"] < 1.0 and row["wall s"] > 0 for row in rows)
