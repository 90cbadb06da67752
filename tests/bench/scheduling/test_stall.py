"""Decoders that end soon after the prompt has come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.scheduling import stall
from stemma.cli.parser import run_command


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "configure_threads", lambda *_: None)  # torch is loaded


def run(folder: Path, num_steps: int) -> int:
    few = ["--decoders", "2", "--prompt-tokens", "64", "--steps", str(num_steps)]
    return run_command(["bench", "stall", *few, "--json", "--out", str(folder)])


def test_a_prompt_is_computed_beside_decoders_of_few_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, num_steps=32) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows and all(row["prompt computed in, s"] > 0 for row in rows)


def test_decoders_that_end_before_the_prompt_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, num_steps=1) == 1
    assert "steps=1 is not allowed; allowed: enough" in capsys.readouterr().err
