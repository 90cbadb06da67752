"""A whole engine on `--device cuda` in Triton's interpreter: process, sockets, programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from engine_thread import Backend, engine_in_thread

import stemma as st

SIZES = {"dtype": "float32", "max_total_tokens": 512, "max_running_requests": 4, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"),
        init_std=0.3,
        seed=3,
        num_heads=2,
        num_kv_heads=1,
        hidden_size=32,
        intermediate_size=64,
    )


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[tuple[Backend, st.Engine]]:
    with (
        engine_in_thread(folder, **SIZES) as on_cpu,
        st.Engine(folder, device="cuda", **SIZES) as on_gpu,
    ):
        yield on_cpu, on_gpu


@st.function
def family(s: st.State) -> None:
    """A shared prefix, two branches, a choice, a draw and a grammar."""
    s += "The tree:"
    one, other = s.fork(2)
    one += st.gen("a", max_tokens=3, temperature=0.0, ignore_eos=True)
    other += " b" + st.gen("b", max_tokens=2, temperature=0.8, seed=4, ignore_eos=True)
    s += one["a"] + other["b"] + st.select("kind", ["ash", "oak"])
    s += st.gen("digits", regex="[0-9]{2}", temperature=0.0)


def test_a_program_says_the_same_as_on_the_cpu(engines: tuple[Backend, st.Engine]) -> None:
    on_cpu, on_gpu = engines
    assert st.get_server_info(on_gpu)["device"] == "cuda"
    texts = [family.run(backend=engine).text() for engine in (on_cpu, on_gpu)]
    assert texts[0] == texts[1]


def test_a_machine_without_a_gpu_says_what_is_missing(folder: Path) -> None:
    environment = {key: os.environ[key] for key in os.environ if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "stemma", "generate", "hello", "--model", str(folder)]
    done = subprocess.run(
        [*command, "--device", "cuda:7"],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "cuda:7" in done.stderr and "CUDA" in done.stderr and "Traceback" not in done.stderr
