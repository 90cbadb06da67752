"""The oracle's guesses, and what becomes of them on a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from stemma.bench.speculation import oracle
from stemma.cli.parser import run_command


@pytest.mark.parametrize("is_small", [False, True], ids=["embedded", "260 tokens"])
def test_a_perfect_oracle_has_all_guesses_accepted(
    is_small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "configure_threads", lambda *_: None)  # torch is loaded
    command = ["bench", "oracle", "--acceptance", "1.0"]
    command += ["--rounds", "1", "--prompt-tokens", "8", "--steps", "30"]
    command += ["--speculative-num-tokens", "4", "--out", str(tmp_path)]
    if is_small:
        command += ["--model", str(make_checkpoint(tmp_path / "model"))]
    assert run_command(command) == 0
    off, perfect = json.loads((tmp_path / "oracle.json").read_text())["rows"]
    assert off["guesses a step"] == 0 and off["tokens a step"] == off["speed-up"] == 1
    assert perfect["tokens a step"] == pytest.approx(perfect["guesses a step"] + 1)
    assert perfect["step_ms"], "what steps took is told"
