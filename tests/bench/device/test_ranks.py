"""The benchmark of ranks, tiny: sums beside a copy and gloo, engines beside one of two threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_thread import EngineInThread

from stemma.bench.device import ranks
from stemma.cli.parser import run_command
from stemma.frontend import backend
from stemma.kernels.native.bindings import why_not_native

missing = why_not_native(torch.bfloat16)


@pytest.mark.skipif(missing is not None, reason=str(missing))
def test_sums_and_steps_are_measured_beside_what_they_compete_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_NUM_SUMS", 2)
    monkeypatch.setattr(backend, "Engine", EngineInThread)
    sizes = ["--rounds", "1", "--batches", "2", "--prompt-tokens", "16", "--max-tokens", "4"]
    assert run_command(["bench", "ranks", *sizes, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "ranks.json").read_text())["rows"]
    sums = [row for row in rows if row["gloo / here"] is not None]
    assert len(sums) == len(ranks.SIZES) and len(rows) == len(sums) + 8
    assert all(row["here"] > 0 for row in sums)
