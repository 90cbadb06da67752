"""--kv-store end to end: an engine in a process of its own, restarted."""

from __future__ import annotations

from pathlib import Path

import pytest

import stemma as st
from stemma.errors import InvalidRequest
from stemma.runtime.config import EngineConfig

TEXT = "".join(f"Rule {number}: {number * 7919 % 1000} comes first. " for number in range(60))


@st.function
def answer(s, question: str):
    s += TEXT + question
    s += st.gen("x", max_tokens=24, temperature=0.0, ignore_eos=True)


def run(checkpoint: Path, store: Path) -> tuple[str, dict, dict]:
    """What is answered, how, and what the engine says of its store."""
    with st.Engine(
        checkpoint, dtype="float64", max_total_tokens=8192, num_threads=1, kv_store=store
    ) as engine:
        state = answer.run("Which?", backend=engine)
        return state["x"], state.get_meta_info("x"), engine.get_server_info()["kv_store"]


def test_a_restarted_engine_answers_the_same_from_its_store(
    checkpoint: Path, tmp_path: Path
) -> None:
    """In float64, where a stored prefix and a computed one may not differ in a single token."""
    first, meta, info = run(checkpoint, tmp_path)
    assert meta["disk_tokens"] == meta["cached_tokens"] == 0 and info["mode"] == "writer"
    again, meta, info = run(checkpoint, tmp_path)
    num_blocks = meta["prompt_tokens"] // 256
    assert num_blocks > 4 and meta["disk_tokens"] == meta["cached_tokens"] == num_blocks * 256
    assert again == first
    assert info["num_restored_tokens"] == num_blocks * 256 and info["num_corrupt"] == 0


def test_pages_that_do_not_divide_a_block_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="page_size=48"):
        EngineConfig(kv_store=tmp_path, page_size=48)
