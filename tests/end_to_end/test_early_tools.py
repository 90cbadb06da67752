"""Pure tools that begin before the model has said what it calls, on real engines over sockets: the
same texts with and without, nothing of what was in vain, no tool but pure ones."""

from __future__ import annotations

import asyncio
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_thread import Backend, engine_in_thread
from waiting import PATIENCE_S, until

import stemma as st
from stemma.frontend.client.early_calls import EarlyCallCounts

QUESTION = "How many people live in Ulm?"
ROUNDS = 8  # after these an output that comes again is known
_SUBJECT = re.compile(r"look up the (.*)\.")


@pytest.fixture(scope="module")
def engine() -> Iterator[Backend]:
    with engine_in_thread(max_total_tokens=8192, num_threads=1) as engine:
        yield engine


def subject_of(text: str) -> str:
    found = _SUBJECT.search(text)
    return text if found is None else found[1]


class Tool:
    """Notes its calls; `begun` once there was one."""

    def __init__(self, pure: bool = True, is_async: bool = False) -> None:
        self.called: list[str] = []
        self.begun = threading.Event()
        self.fails_on_early_threads = False
        made = self._look_up_async if is_async else self._look_up
        self.tool = st.tool(made, pure=pure)

    def _look_up(self, subject: str) -> str:
        self.called.append(subject)
        self.begun.set()
        if self.fails_on_early_threads and threading.current_thread().name == "stemma-early":
            raise OSError("not here")
        return f"{subject}: 127,000"

    async def _look_up_async(self, subject: str) -> str:
        return self._look_up(subject)

    def read(self, text: str) -> functools.partial[Any]:
        return functools.partial(self.tool, subject_of(text))


@st.function
def agent(
    s: st.ProgramState, tool: Tool, before: Callable[[], object], ahead: Any, argument: Any
) -> None:
    s += f"Question: {QUESTION}\nThought:"
    s += st.gen("thought", max_tokens=40, stop="\n", temperature=0, ahead=ahead)
    subject = subject_of(s["thought"])
    before()
    result = tool.tool(s, subject if argument is None else argument)
    s += f"\nObservation: {result}\nThought:" + st.gen("next", max_tokens=12, temperature=0)


def nothing() -> None: ...


def run(
    engine: Backend, tool: Tool, before: Callable[[], object] = nothing, **options: Any
) -> tuple[str, EarlyCallCounts]:
    given = {"ahead": tool.read, "argument": None, **options}
    state = agent.run(tool, before, **given, backend=engine)
    return state.text(), state._program.early_calls.counts


@pytest.fixture(scope="module")
def plain_text(engine: Backend) -> str:
    """Without anything ahead; then the engine has had the output often enough to know it."""
    text, counts = run(engine, Tool(), ahead=None)
    assert counts == EarlyCallCounts()
    for _ in range(ROUNDS):
        assert run(engine, Tool())[0] == text
    return text


def test_a_pure_tool_begins_early_is_carried_out_once_and_nothing_changes(
    engine: Backend, plain_text: str
) -> None:
    tool = Tool()
    text, counts = run(engine, tool, before=lambda: tool.begun.wait(PATIENCE_S))
    assert tool.begun.is_set() and text == plain_text
    assert len(tool.called) == 1 and (counts.num_used, counts.num_failed) == (1, 0)


@st.function
def asker(
    s: st.ProgramState, city: str, tool: Tool, before: Callable[[], object], ahead: Any
) -> None:
    s += f"Question: How many people live in {city}?\nThought:"
    s += st.gen("thought", max_tokens=40, stop="\n", temperature=0, ahead=ahead)
    before()
    s += f"\nObservation: {tool.tool(s, subject_of(s['thought']))}\n"


def test_a_tool_begins_early_for_what_nobody_has_asked_before() -> None:
    tool = Tool()
    with st.Engine(max_total_tokens=8192, num_threads=1) as engine:
        plain = asker.run("Hamburg", Tool(), nothing, None, backend=engine).text()
        for city in ("Bonn", "Kiel", "Dresden", "Vienna", "Paris", "Berlin"):
            other = Tool()
            asker.run(city, other, nothing, other.read, backend=engine).text()
        state = asker.run(
            "Hamburg", tool, lambda: tool.begun.wait(PATIENCE_S), tool.read, backend=engine
        )
        assert state.text() == plain and tool.called == ["population of Hamburg"]
        assert state._program.early_calls.counts.num_used == 1


def test_a_report_says_what_early_calls_have_brought(engine: Backend, plain_text: str) -> None:
    tool = Tool()
    state = agent.run(tool, lambda: tool.begun.wait(PATIENCE_S), tool.read, None, backend=engine)
    report = state.report()
    assert "early calls of tools: 1 begun, 1 used, 0 failed" in report.to_text()
    early = report.to_json()["programs"][0]["early_calls"]
    assert early["num_used"] == 1 and early["saved_s"] > 0
    told = engine.get_server_info()["foretold"]
    assert told["num_right"] >= 1 and told["num_told"] >= told["num_right"]


def test_a_tool_that_is_not_pure_is_called_by_the_program_alone(
    engine: Backend, plain_text: str
) -> None:
    tool = Tool(pure=False)
    text, counts = run(engine, tool, before=lambda: tool.called.append("so far"))
    assert text == plain_text and len(tool.called) == 2 and tool.called[0] == "so far"
    assert counts.num_begun == 0


def test_a_wrong_guess_gives_its_value_to_nobody(engine: Backend, plain_text: str) -> None:
    tool = Tool()
    text, counts = run(
        engine, tool, before=lambda: tool.begun.wait(PATIENCE_S), argument="the rest"
    )
    assert "the rest: 127,000" in text and tool.called[-1] == "the rest"
    assert (counts.num_begun, counts.num_used) == (1, 0)


def test_a_tool_that_fails_early_is_called_again(engine: Backend, plain_text: str) -> None:
    tool = Tool()
    tool.fails_on_early_threads = True
    text, counts = run(engine, tool, before=lambda: tool.begun.wait(PATIENCE_S))
    assert text == plain_text and len(tool.called) == 2
    assert (counts.num_used, counts.num_failed) == (0, 1)


def test_in_an_async_program_a_coroutine_begins_early_in_its_loop(
    engine: Backend, plain_text: str
) -> None:
    tool = Tool(is_async=True)

    @st.function
    async def agent_async(s: st.ProgramState) -> None:
        s += f"Question: {QUESTION}\nThought:"
        s += st.gen("thought", max_tokens=40, stop="\n", temperature=0, ahead=tool.read)
        subject = subject_of(await s.aget("thought"))
        await until(tool.begun.is_set)
        result = await s.acall(tool.tool, subject)
        s += f"\nObservation: {result}\nThought:" + st.gen("next", max_tokens=12, temperature=0)
        await s.adone()

    async def main() -> st.ProgramState:
        return await agent_async.arun(backend=engine)

    state = asyncio.run(main())
    counts = state._program.early_calls.counts
    assert len(tool.called) == 1 and counts.num_used == 1
    assert state.text() == plain_text


def test_a_cancelled_program_takes_nothing_and_its_engine_goes_on(
    engine: Backend, plain_text: str
) -> None:
    tool, states = Tool(), list[st.ProgramState]()

    @st.function
    def cancelled(s: st.ProgramState) -> None:
        states.append(s)
        s += f"Question: {QUESTION}\nThought:"
        s += st.gen("thought", max_tokens=40, stop="\n", temperature=0, ahead=tool.read)
        s._program.flush()
        tool.begun.wait(PATIENCE_S)
        s.cancel()

    with pytest.raises(st.StemmaError):
        cancelled.run(backend=engine).text()
    program = states[0]._program
    assert not program.early_calls and program.early_calls.counts.num_used == 0
    assert run(engine, Tool())[0] == plain_text


def test_an_engine_that_does_nothing_ahead_tells_nothing(plain_text: str) -> None:
    with engine_in_thread(max_total_tokens=8192, num_threads=1, disable_ahead=True) as engine:
        for _ in range(ROUNDS + 1):
            text, counts = run(engine, Tool())
            assert text == plain_text and counts.num_begun == 0


@pytest.mark.parametrize("ahead", ["text", 3])
def test_what_is_no_function_is_refused(ahead: Any) -> None:
    with pytest.raises(st.InvalidProgram, match="ahead"):
        st.gen("x", ahead=ahead)


def test_several_samples_have_no_text_to_be_told_of() -> None:
    with pytest.raises(st.InvalidProgram, match="ahead"):
        st.gen("x", n=2, ahead=lambda text: None)
