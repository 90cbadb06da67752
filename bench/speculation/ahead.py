"""What work ahead of programs brings: ReAct agents whose tools take a while, with it and without.

Two engines, a process each, carry out the same held-out conversations of the embedded model in
turns; the tools are pure and sleep. In the first round every task is new, in the second all come
again. With `--history` they have carried out others before, as a service that has been running;
`--load pipeline`: tasks of few templates in place of what people ask. With `--parallel 64` and a
small `--max-total-tokens` the pool holds a part of them, and nothing should be spent ahead. `CPU
ratio` is of the engines' CPU time. Outputs are compared, too: work ahead changes none, but steps of
other sizes round otherwise (`--dtype float64 --kernels reference`: all the same).

The embedded model says a turn in some 60 ms, so that tools of half a second are nearly all of an
agent's time, and little can go on beside them; in float64 through the reference kernels it takes
about as long as a model of some billions of parameters on one GPU does.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ...flags import count
from ...frontend.backend import Engine
from ...frontend.client.early_calls import EarlyCallCounts
from ...frontend.dsl.expr import assistant_begin, assistant_end, system, user
from ...frontend.dsl.function import function
from ...frontend.dsl.generation import gen
from ...frontend.dsl.state import ProgramState
from ...frontend.dsl.tool import Tool
from ...runtime.checkpoint.location import EMBEDDED_MODEL
from ..harness.process_meter import process_cpu_s
from ..harness.report import write_report
from .agent_tasks import LOADS, agent_tasks
from .conversations import ACTION, MAX_ACTIONS, STOP, Conversation, use_tool

ROUNDS = ("new tasks", "again")
COUNTS = ("num_begun", "num_used", "num_failed", "saved_s")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench ahead`."""
    add = parser.add_argument
    add("--model", type=Path, default=EMBEDDED_MODEL, metavar="FOLDER",
        help="checkpoint (default: the embedded model)")  # fmt: skip
    add("--conversations", type=count, default=20, metavar="N", help="(default: %(default)s)")
    add("--load", choices=LOADS, default=LOADS[0], help="whose tasks (default: %(default)s)")
    add("--history", type=int, default=0, metavar="N",
        help="other conversations that both engines have had before (default: none)")  # fmt: skip
    add("--copies", type=count, default=1, metavar="N", help="of each, side by side")
    add("--parallel", type=count, default=1, metavar="N", help="conversations at once")
    add("--tool-s", type=float, default=0.5, help="that a tool takes (default: %(default)s)")
    add("--observed-words", type=int, default=0, metavar="N",
        help="behind what a tool has found, as of a page that was read")  # fmt: skip
    add("--max-total-tokens", type=count, default=32_768, metavar="N")
    add("--dtype", default="auto")
    add("--kernels", default="auto")
    add("--speculate", default="auto", metavar="LIST")
    add("--num-threads", type=count, metavar="N")
    add("--repeats", type=count, default=3, help="of both engines, new each time")


def run(args: argparse.Namespace) -> int:
    """Measure and report."""
    cases, before = agent_tasks(args.load, args.conversations, args.history)
    cases *= args.copies
    measured = {name: (_Side(), _Side()) for name in ROUNDS}
    for number in range(args.repeats):
        _repeat(args, cases, before, measured, is_reversed=number % 2 > 0)
    rows = [_row(name, *sides) for name, sides in measured.items()]
    write_report("ahead", rows, args)
    return 0


@dataclass(slots=True)
class _Side:
    """One engine in one round, over the repeats; all but the times are the last repeat's."""

    wall_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)  # of CPU
    texts: list[str] = field(default_factory=list)
    early: list[EarlyCallCounts] = field(default_factory=list)
    num_calls: int = 0
    ahead: dict[str, float] = field(default_factory=dict)


def _repeat(
    args: argparse.Namespace,
    cases: Sequence[Conversation],
    before: Sequence[Conversation],
    measured: dict[str, tuple[_Side, _Side]],
    *,
    is_reversed: bool,
) -> None:
    """On new engines; `is_reversed`: the one with work ahead goes first."""
    options = {
        name: getattr(args, name)
        for name in ("max_total_tokens", "dtype", "kernels", "speculate", "num_threads")
    }
    engines = [Engine(args.model, disable_ahead=is_off, **options) for is_off in (True, False)]
    try:
        for engine in engines:
            _warm_up.run(backend=engine).text()
            for case in before:
                _agent.run(case=case, tool=_tool(args, case.facts, 0.0), backend=engine).text()
        facts = {subject: fact for case in cases for subject, fact in case.facts.items()}
        tool = _tool(args, facts, args.tool_s)
        for sides in measured.values():
            for side in sides:
                side.wall_s.append(0.0)
                side.engine_s.append(0.0)
                side.texts, side.early, side.num_calls = [], [], 0
            for first in range(0, len(cases), args.parallel):
                batch = cases[first : first + args.parallel]
                turns = list(zip(engines, sides, strict=True))
                for engine, side in reversed(turns) if is_reversed else turns:
                    _carry_out(engine, batch, tool, side)
            sides[1].ahead = engines[1].get_server_info()["ahead"]
    finally:
        for engine in engines:
            engine.shutdown()


def _tool(args: argparse.Namespace, facts: dict[str, str], takes_s: float) -> Tool:
    def use(tool: str, argument: str) -> str:
        time.sleep(takes_s)
        page = " ".join(f"{argument} {number}" for number in range(args.observed_words // 2))
        return f"{use_tool(tool, argument, facts)} {page}".rstrip()

    return Tool(use, takes_s, pure=True)


@function
def _warm_up(s: ProgramState) -> None:
    s += "1" + gen("number", max_tokens=2)


@function
def _agent(s: ProgramState, case: Conversation, tool: Tool) -> int:
    """As in `conversations`; returns how often the tool was called."""
    num_calls = 0
    for text in case.system:
        s += system(text)
    for turn, question in enumerate(case.user):
        s += user(question) + assistant_begin()
        for step in range(MAX_ACTIONS + 1):
            name = f"step{turn}.{step}"
            ahead = partial(_call_in, tool)
            s += gen(name, max_tokens=case.max_tokens, stop=STOP, temperature=0, ahead=ahead)
            action = ACTION.search(s[name])
            if action is None:
                break
            num_calls += 1
            s += f"{STOP} {tool(s, *_arguments(action))}\n"
        s += assistant_end()
    return num_calls


def _call_in(tool: Tool, text: str) -> partial[Any] | None:
    action = ACTION.search(text)
    return None if action is None else partial(tool, *_arguments(action))


def _arguments(action: re.Match[str]) -> tuple[str, str]:
    return action[1], action[2]


def _carry_out(engine: Engine, batch: Sequence[Conversation], tool: Tool, side: _Side) -> None:
    many = [{"case": case, "tool": tool} for case in batch]
    started, cpu_s = time.perf_counter(), process_cpu_s(engine.pid)
    if len(many) == 1:
        states = [_agent.run(**many[0], backend=engine)]
    else:
        states = _agent.run_batch(many, backend=engine, num_threads=len(many))
    side.texts += [state.text() for state in states]
    side.wall_s[-1] += time.perf_counter() - started
    side.engine_s[-1] += process_cpu_s(engine.pid) - cpu_s
    side.num_calls += sum(state.ret_value for state in states)
    side.early += [state._program.early_calls.counts for state in states]


def _row(name: str, off: _Side, on: _Side) -> dict[str, Any]:
    counts = {each: sum(asdict(early)[each] for early in on.early) for each in COUNTS}
    ratios = [a / b for a, b in zip(off.wall_s, on.wall_s, strict=True)]
    return {
        "round": name,
        "off, s": statistics.median(off.wall_s),
        "on, s": statistics.median(on.wall_s),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "CPU ratio": statistics.median(
            a / b for a, b in zip(off.engine_s, on.engine_s, strict=True)
        ),
        "tool calls": on.num_calls,
        "early": counts["num_begun"],
        "used": counts["num_used"],
        "saved, s": counts["saved_s"],
        "prefilled": on.ahead.get("num_tokens", 0),
        "of use": on.ahead.get("num_used_tokens", 0),
        "same texts": sum(a == b for a, b in zip(off.texts, on.texts, strict=True))
        / max(1, len(on.texts)),
    }
