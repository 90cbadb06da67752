"""The benchmark of --deterministic, tiny: every step has a ratio, and answers do not differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stemma.bench.device import determinism
from stemma.cli.parser import run_command
from stemma.kernels.native.bindings import why_not_native


@pytest.mark.skipif(why_not_native(torch.bfloat16) is not None, reason="no compiled kernels")
def test_costs_and_answers_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(determinism, "configure_threads", lambda *_: None)  # torch is loaded
    arguments = ["bench", "determinism", "--batches", "1", "2", "--prompt-tokens", "20"]
    few = ["--shared-tokens", "64", "--steps", "1", "--repeats", "1", "--answers", "6"]
    assert run_command([*arguments, *few, "--json", "--out", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [
        "prefill, 1 x 20 tokens",
        "decode, 1 x 20 tokens",
        "prefill, 2 x 20 tokens",
        "decode, 2 x 20 tokens",
        "decode, 2 that share 64 tokens",
    ]
    assert all(row["ratio"] > 0 for row in rows)
    _, fixed = json.loads((tmp_path / "determinism.json").read_text())["answers"]
    assert fixed["texts that differ"] == "0 of 6" and fixed["largest difference"] == 0.0
