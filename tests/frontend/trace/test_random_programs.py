"""Any program, whatever it forks and joins, has a picture and a report that agree with it."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as strats
from scripted_channel import ScriptedChannel, open_scripted

import stemma as st
from stemma.frontend.dsl.state import ProgramState
from stemma.frontend.protocol import ir
from stemma.frontend.trace.graph import Graph
from stemma.frontend.trace.graph_picture import _placed
from stemma.frontend.trace.report import report_of


class RandomMetas(dict[str, Any]):
    """Times for a call of any name, as a runtime might have sent them."""

    def __init__(self, draws: random.Random) -> None:
        super().__init__()
        self._draws = draws

    def get(self, name: str, default: Any = None) -> Any:
        parts = [self._draws.uniform(0, 2) for _ in range(3)]
        return {
            "start_s": self._draws.uniform(0, 5),
            **dict(zip(("queue_s", "prefill_s", "decode_s"), parts)),
            "latency_s": sum(parts),
            "prompt_tokens": 10,
            "cached_tokens": self._draws.randrange(11),
        }


def grow(s: ProgramState, draws: random.Random, depth: int = 0) -> None:
    """Append at random; every fork is joined at the end or left alone."""
    for step in range(draws.randrange(1, 4)):
        s += f"text {step}" + st.gen(f"x{step}")
        if draws.random() < 0.3:
            s += s.var(f"x{step}")
        if depth < 2 and draws.random() < 0.6:
            forks = s.fork(draws.randrange(1, 4))
            for fork in forks:
                grow(fork, draws, depth + 1)
            if draws.random() < 0.7:
                forks.join()
        if draws.random() < 0.3:
            s[f"x{step}"]  # the author waits, and goes on with other branches then


@settings(max_examples=40)
@given(strats.integers(0, 2**32))
def test_pictures_and_reports_agree_with_the_program(seed: int) -> None:
    draws = random.Random(seed)
    s = open_scripted(ScriptedChannel(RandomMetas(draws)))
    grow(s, draws)
    s.end()
    graph = Graph("p", [op for _, op in s._program.log])
    ops = [op for branch in graph.branches for op in branch.ops]
    assert sorted(map(str, ops)) == sorted(map(str, graph.ops)), "each op is on one branch"
    columns = {branch.number: index for index, branch in enumerate(graph.branches)}
    shown = [
        box
        for box in _placed(graph, columns).values()
        if not isinstance(box.op, ir.RoleBegin | ir.RoleEnd | ir.End)
    ]
    assert len({(box.column, box.row) for box in shown}) == len(shown), "no box covers another"

    (program,) = report_of(s._program).programs
    num_calls = sum(isinstance(op, ir.Gen) for op in graph.ops)
    assert len(program.calls) == num_calls
    for index, call in enumerate(program.calls):
        assert call.follows is None or call.follows < index
        assert call.start_s is not None and call.end_s is not None and call.start_s >= 0
    ends = [call.end_s or 0.0 for call in program.calls]
    assert any(call.is_critical for call in program.calls if call.end_s == max(ends))
    assert program.critical_s <= max(ends) + 1e-9
    assert [lane.path for lane in program.lanes] == [b.path for b in graph.branches]
    markup = report_of(s._program).to_html()
    assert all(f'<tr id="c{n}">' in markup and f'href="#c{n}"' in markup for n in range(num_calls))
