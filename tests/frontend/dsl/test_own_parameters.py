"""Parameters of a function's own that are called like an option of a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from recording_channel import PlayedChannel

import stemma as st
from stemma.frontend.dsl.options import RUN_OPTIONS

pytestmark = pytest.mark.usefixtures("no_test_hangs")

OF_CALLS = ("stream", "num_threads", "generator_style", "progress_bar", "raise_errors")
ALL = sorted((RUN_OPTIONS - {"backend"}) | {*OF_CALLS, "self", "run", "args", "kwargs", "fn"})


def program_with(name: str, is_async: bool) -> st.Function:
    """A program that returns its only parameter, called `name`."""
    begin = "async def" if is_async else "def"
    scope: dict[str, Any] = {}
    exec(f"{begin} program(s, {name}='the default'):\n    return {name}", scope)
    return st.function(scope["program"])


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("name", ALL)
def test_a_parameter_of_the_functions_own_wins(name: str, is_async: bool) -> None:
    fn, backend = program_with(name, is_async), PlayedChannel().backend
    given: dict[str, Any] = {name: "own"}

    async def from_async_code() -> list[Any]:
        one = await fn.arun(backend=backend, **given)
        streamed = await fn.astream(backend=backend, **given)
        await streamed.atext()
        batch = await fn.arun_batch([given, {}], backend=backend)
        return [state.ret_value for state in (one, streamed, *batch)]

    streamed = fn.stream(backend=backend, **given)
    streamed.text()
    batch = [*fn.run_batch([given], backend=backend), *fn.run_batch([{}], backend=backend, **given)]
    states = [fn.run(backend=backend, **given), fn(backend=backend, **given), streamed, *batch]
    assert [state.ret_value for state in states] == ["own"] * 5
    assert fn.run(backend=backend).ret_value == "the default"
    assert fn.bind(**given).run(backend=backend).ret_value == "own"
    assert asyncio.run(from_async_code()) == ["own"] * 3 + ["the default"]


def test_a_parameter_called_backend_wins_in_a_capture_too() -> None:
    @st.function
    def program(s: st.ProgramState, backend: str) -> None:
        s += backend

    assert "another" in program.trace(backend="another").to_text()


def test_what_cannot_be_given_by_name_leaves_the_option_alone() -> None:
    @st.function
    def program(s: st.ProgramState, stream: int, /, *seed: int) -> tuple[int, ...]:
        return stream, *seed

    channel = PlayedChannel()
    state = program.run(1, 2, seed=3, stream=True, backend=channel.backend)
    state.text()
    assert state.ret_value == (1, 2)
    assert channel.creates[1] == {
        "seed": 3, "instance": 0, "stream": True, "token_ids": True
    }  # fmt: skip


def test_arguments_of_a_tool_may_have_any_name() -> None:
    @st.tool
    def named(self: int, fn: int) -> int:
        return self + fn

    @st.function
    def program(s: st.ProgramState) -> int:
        return int(s.call(named, self=1, fn=2) + named(s, self=3, fn=4))

    assert program.run(backend=PlayedChannel().backend).ret_value == 10


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_sync_raises_what_ended_a_streaming_run_before_it_had_appended(is_async: bool) -> None:
    def fail(s: st.ProgramState) -> None:
        raise LookupError("the author's own")

    async def fail_async(s: st.ProgramState) -> None:
        raise LookupError("the author's own")

    state = st.function(fail_async if is_async else fail).stream(backend=PlayedChannel().backend)
    with pytest.raises(LookupError, match="the author's own"):
        list(state.text_iter())
    with pytest.raises(LookupError, match="the author's own"):
        state.sync()
    with pytest.raises(LookupError, match="the author's own"):
        asyncio.run(state.adone())
