"""A GGUF file as a user gives it: to an engine, and to a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from caches import own_cache
from checkpoints import make_checkpoint
from engine_thread import engine_in_thread
from gguf_files import write_gguf
from step_plans import PlanDriver

import stemma as st
from stemma.runtime.checkpoint.location import locate_model
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.tokenizer.tokenizer import Tokenizer

TEXT = "Once upon a time"
FLAGS = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 2}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_cache(monkeypatch, tmp_path / "cache")
    make_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "alone").mkdir()
    return write_gguf(tmp_path / "checkpoint", tmp_path / "alone" / "tiny.F32.gguf")


def test_an_engine_and_a_command_answer_as_the_checkpoint_does(file: Path) -> None:
    """The engine takes the folder with nothing but the file in it, the command the file."""
    expected = _greedy(file.parent.parent / "checkpoint", 8)

    @st.function
    def program(s: st.ProgramState) -> None:
        s += TEXT + st.gen("x", max_tokens=8, temperature=0.0)

    with engine_in_thread(file.parent, **FLAGS) as engine:
        assert program.run(backend=engine)["x"] == expected
    command = [sys.executable, "-m", "stemma", "generate", TEXT, "--raw", "--json"]
    command += ["--model", str(file), "--temperature", "0", "--max-tokens", "8"]
    command += ["--load-format", "gguf", "--dtype", "float32", "--max-total-tokens", "512"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"] == expected
    assert locate_model(file) == locate_model(file.parent)


def _greedy(folder: Path, count: int) -> str:
    config = read_model_config(folder)
    runner = ModelRunner(
        folder, config, dtype="float32", num_pages=64, max_model_len=64, max_running_requests=2
    )
    tokenizer = Tokenizer(folder, config.vocab_size)
    return tokenizer.decode(PlanDriver(runner).generate([tokenizer.encode(TEXT)], count)[0])
