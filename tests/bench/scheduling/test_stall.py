"""Decoders that end soon after the prompt has come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_STALL = [sys.executable, "-m", "stemma", "bench", "stall", "--decoders", "2", "--prompt-tokens"]


def stall(folder: Path, num_steps: int) -> subprocess.CompletedProcess[str]:
    command = [*_STALL, "64", "--steps", str(num_steps), "--json", "--out", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_prompt_is_computed_beside_decoders_of_few_steps(tmp_path: Path) -> None:
    done = stall(tmp_path, num_steps=32)
    assert all(row["prompt computed in, s"] > 0 for row in json.loads(done.stdout)), done.stderr


def test_decoders_that_end_before_the_prompt_are_refused(tmp_path: Path) -> None:
    done = stall(tmp_path, num_steps=1)
    assert done.returncode == 1 and "steps=1 is not allowed; allowed: enough" in done.stderr
