"""Programs for tests of a router: what they say is the same wherever their parts run."""

from __future__ import annotations

from typing import Any

import stemma as st
from stemma.frontend.client.backend import Backend

GEN: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True}


@st.function
def agent(s: st.ProgramState, number: int) -> None:
    """Turns with values that are read between them, forks, races, variables, a choice."""
    s += f"Agent {number}. "
    for turn in range(2):
        s += f"Turn {turn}: " + st.gen(f"t{turn}", max_tokens=9, **GEN)
        with s.pause(expected_s=0.0, label="tool"):
            s[f"t{turn}"]
    drafts = s.fork(3)
    drafts += lambda i: f"draft {i} " + st.gen("draft", max_tokens=4 + 3 * i, **GEN)
    drafts.join("concate_and_append")
    s += " best: " + st.select("best", ["yes", "no"])
    s += s.var("t0") + " and " + st.gen("last", max_tokens=6, stop="e", **GEN)


def said_by(backend: Backend, num_agents: int = 8) -> list[str]:
    states = agent.run_batch([{"number": n} for n in range(num_agents)], seed=5, backend=backend)
    return [state.text() for state in states]


@st.function
def story(s: st.ProgramState) -> None:
    s += "Once " + st.gen("a", max_tokens=120, **GEN)
