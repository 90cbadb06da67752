"""Programs and small tools shared by the DSL tests."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stemma as st

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@st.function
def two_gens(s: st.ProgramState, question: str) -> None:
    s += "Q: " + question + " A: "
    s += st.gen("first", max_tokens=6, **GREEDY) + " so "
    s += st.gen("second", max_tokens=4, **GREEDY)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Fails, rather than hangs, when the block takes longer."""

    def expire(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keeps the garbage collector from scanning the test run's own objects again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def line_of(file: str, marker: str) -> str:
    """ "file:line" of the one line of `file` that ends in the comment `marker`."""
    lines = Path(file).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}")]
    return f"{Path(file).name}:{number}"


def wait_until_idle(engine: st.Engine, seconds: float = 120.0) -> None:
    """Wait until nothing runs, and all occupied KV is cached and evictable or only leased."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        info = engine.get_server_info()
        held = info["total_tokens"] - info["free_tokens"] - info["evictable_tokens"]
        held -= info["leases"]["leased_tokens"]
        if not (info["num_running"] or info["num_waiting"] or info["num_programs"] or held):
            return
        time.sleep(0.02)
    raise AssertionError(f"still busy: {info}")
