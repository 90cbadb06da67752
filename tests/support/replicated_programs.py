"""Programs that say the same wherever they run, for tests of servers with several engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import stemma as st

GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True}


@st.function
def agent(s: st.ProgramState, number: int) -> None:
    s += f"Agent {number}: " + st.gen("a", max_tokens=40, **GEN)
    forks = s.fork(2)
    forks += lambda i: f" part {i} " + st.gen("b", max_tokens=20, **GEN)
    forks.join("concate_and_append")


def begun(backend: st.Runtime) -> Iterator[st.ProgramState]:
    """16 agents in flight, each as it is done."""
    numbers = [{"number": n} for n in range(16)]
    return iter(agent.run_batch(numbers, seed=2, backend=backend, generator_style=True))


def said_by(backend: st.Runtime) -> list[str]:
    return [state.text() for state in begun(backend)]
