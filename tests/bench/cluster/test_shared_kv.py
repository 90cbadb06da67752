"""The benchmark of KV in Redis: what one engine has computed, another one fetches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_thread import EngineInThread
from redis_server import RedisServer

from stemma.bench.cluster import shared_kv
from stemma.cli.parser import run_command


def test_only_a_known_prompt_comes_from_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_kv, "Engine", EngineInThread)
    server = RedisServer(tmp_path)
    flags = ["--redis", server.url, "--prompt", "1100", "--repeats", "1", "--threads", "1"]
    try:
        assert run_command(["bench", "shared-kv", *flags, "--json", "--out", str(tmp_path)]) == 0
    finally:
        server.kill()
    rows = json.loads(capsys.readouterr().out)
    assert [row["first token"] for row in rows] == ["fetched", "computed", "computed, no store"]
    assert [row["from the store"] > 1000 for row in rows] == [True, False, False]
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in rows)
