"""The comparison of simulated replicas with real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.__main__ import main
from stemma.bench.cluster import simulated


@pytest.mark.parametrize("against", ["replicas", "steps"])
def test_simulated_replicas_find_the_same_cached(
    against: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are this machine's; what is cached is the same, whatever it is."""
    monkeypatch.setattr(simulated, "configure_threads", lambda *_: None)  # torch is loaded
    flags = ["--replicas", "1", "--load", "chats", "--conversations", "3", "--repeats", "1"]
    flags += ["--against", against]
    assert main(["bench", "simulated", *flags, "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads((tmp_path / "simulated.json").read_text())["rows"]
    found = {row["figure"]: row for row in rows}
    assert found["hit rate"]["simulated / real"] == pytest.approx(1.0, abs=0.03)
    assert found["output tokens/s"]["real"] > 0 and found["TTFT p50, ms"]["simulated"] > 0
