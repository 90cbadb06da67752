"""What engines say that find each other's KV at a server: the same as without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_thread import serving
from waiting import wait_until

import stemma as st
from stemma.frontend.client.backend import Backend

OPTIONS = {"max_total_tokens": 4096, "max_model_len": None}


@st.function
def story(s: st.ProgramState, number: int) -> None:
    s += f"Story {number}: " + "The quick brown fox jumps over the lazy dog. " * 8
    s += st.gen("a", max_tokens=8, temperature=0.7, ignore_eos=True)


def said_by(backend: Backend) -> list[Any]:
    """Four stories' tokens; the prompts are longer than a block."""
    states = story.run_batch([{"number": n} for n in range(4)], seed=1, backend=backend)
    return [state.get_meta_info("a")["output_ids"] for state in states]


def assert_the_second_engine_computes_less(checkpoint: Path, url: str) -> None:
    """Two engines in turn; the second one finds what the first one has computed."""
    with serving(checkpoint, **OPTIONS) as backend:
        truth = said_by(backend)
    for index in range(2):
        with serving(checkpoint, kv_store=url, **OPTIONS) as backend:
            wait_until(lambda: _store_of(backend)["mode"] == "writer")
            assert said_by(backend) == truth
            if index == 0:
                assert _store_of(backend)["num_restored_tokens"] <= 900
            else:
                wait_until(lambda: _has_restored(backend, truth))  # a slow answer is a miss
                num_restored = _store_of(backend)["num_restored_tokens"]
                assert said_by(backend) == truth  # with its own copy
                assert _store_of(backend)["num_restored_tokens"] == num_restored
            wait_until(lambda: _store_of(backend)["num_blocks"] >= 4)


def _has_restored(backend: Backend, truth: list[str]) -> bool:
    """Whether KV of the store has served, which changes nothing; if not yet, it is asked again."""
    if _store_of(backend)["num_restored_tokens"] > 900:
        return True
    backend.flush_cache()
    assert said_by(backend) == truth
    return False


def _store_of(backend: Backend) -> dict[str, Any]:
    return dict(backend.get_server_info()["kv_store"])
