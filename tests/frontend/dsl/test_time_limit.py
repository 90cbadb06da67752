"""`run(timeout=)` and its kin: programs that do not end in time are cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from engine_thread import Backend, engine_in_thread

import stemma as st


@pytest.fixture(scope="module")
def engine() -> Iterator[Backend]:
    with engine_in_thread(num_threads=1, max_total_tokens=4096) as engine:
        yield engine


@st.function
def endless(s: st.ProgramState) -> None:
    s += "Count: " + st.gen("x", max_tokens=1900, ignore_eos=True)


@st.function
async def endless_async(s: st.ProgramState) -> None:
    while True:
        s += "Count: " + st.gen("x", max_tokens=8, ignore_eos=True)
        await s.aget("x")


MESSAGE = r"the program has not ended within timeout=0\.05 s"


@pytest.mark.parametrize("program", [endless, endless_async])
def test_a_run_that_does_not_end_in_time_is_cancelled(engine: Backend, program: Any) -> None:
    with pytest.raises(TimeoutError, match=MESSAGE):
        program.run(backend=engine, timeout=0.05)
    with pytest.raises(TimeoutError, match=MESSAGE):
        asyncio.run(program.arun(backend=engine, timeout=0.05))


@st.function
def late(s: st.ProgramState) -> None:
    s += "Count: "
    s.call(wait_for_the_end_of, s)
    s += st.gen("x", max_tokens=2)


@st.function
async def late_async(s: st.ProgramState) -> None:
    s += "Count: "
    await s.acall(wait_for_the_end_of, s)
    s += st.gen("x", max_tokens=2)


def wait_for_the_end_of(s: st.ProgramState) -> None:
    has_ended = threading.Event()
    s._program.on_end = lambda program: has_ended.set()
    assert s._program.is_done or has_ended.wait(60)


@pytest.mark.parametrize("program", [late, late_async])
def test_a_function_that_appends_beyond_its_time_gets_the_same_error(
    engine: Backend, program: Any
) -> None:
    options: dict[str, Any] = {"backend": engine, "timeout": 0.05}
    with pytest.raises(TimeoutError, match=MESSAGE):
        program.run(**options)
    for states in (
        program.run_batch([{}] * 2, raise_errors=False, **options),
        asyncio.run(program.arun_batch([{}] * 2, raise_errors=False, **options)),
    ):
        for state in states:
            with pytest.raises(TimeoutError, match=MESSAGE):
                raise state.error()
    with pytest.raises(st.BatchError) as raised:
        program.run_batch([{}] * 2, **options)
    assert {type(error) for error in raised.value.errors.values()} == {TimeoutError}


def test_what_a_function_raises_beyond_its_time_is_the_cause(engine: Backend) -> None:
    @st.function
    def failing(s: st.ProgramState) -> None:
        wait_for_the_end_of(s)
        raise OSError("the tool was too late")

    with pytest.raises(st.BatchError) as raised:
        failing.run_batch([{}] * 2, backend=engine, timeout=0.05)
    for error in raised.value.errors.values():
        assert isinstance(error, TimeoutError) and isinstance(error.__cause__, OSError)


@pytest.mark.parametrize(("is_cancelled", "why"), [(True, "was cancelled"), (False, MESSAGE)])
def test_a_stream_tells_why_it_ended_after_its_function_has_failed_of_that(
    engine: Backend, is_cancelled: bool, why: str
) -> None:
    async def error() -> Exception | None:
        state = await late_async.astream(backend=engine, timeout=None if is_cancelled else 0.05)
        if is_cancelled:
            state.cancel()
        await cast("asyncio.Task[None]", state._program.runner)
        return state.error()

    with pytest.raises(st.EngineError if is_cancelled else TimeoutError, match=why):
        raise asyncio.run(error()) or AssertionError("none")


def test_of_a_batch_those_that_ended_are_kept(engine: Backend) -> None:
    @st.function
    def either(s: st.ProgramState, ends: bool) -> None:
        s += "Count: " + st.gen("x", max_tokens=1 if ends else 1900, ignore_eos=True)

    with pytest.raises(st.BatchError) as raised:
        either.run_batch([{"ends": n == 0} for n in range(3)], backend=engine, timeout=1.0)
    assert set(raised.value.errors) >= {1, 2}
    assert all(isinstance(e, TimeoutError) for e in raised.value.errors.values())


def test_a_stream_ends_with_its_time(engine: Backend) -> None:
    state = endless.stream(backend=engine, timeout=0.05)
    with pytest.raises(TimeoutError, match=MESSAGE):
        for _ in state.text_iter():
            pass


def test_what_ends_in_time_is_left_alone(engine: Backend) -> None:
    @st.function
    def short(s: st.ProgramState) -> None:
        s += "Count: " + st.gen("x", max_tokens=2)

    assert short.run(backend=engine, timeout=600)["x"]
    assert short.run_batch([{}] * 2, backend=engine, timeout=600)[1]["x"]
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join(60)
            assert not timer.is_alive(), "it was cancelled"


@pytest.mark.parametrize("timeout", [0, -1, "1", float("nan"), float("inf"), True])
def test_times_that_are_none_are_refused(engine: Backend, timeout: Any) -> None:
    with pytest.raises(st.InvalidRequest, match="timeout"):
        endless.run(backend=engine, timeout=timeout)


def test_asyncios_own_timeout_within_a_program_ends_a_wait_alone(engine: Backend) -> None:
    @st.function
    async def patient(s: st.ProgramState) -> str:
        (side,) = s.fork(1)
        side += "Count: " + st.gen("x", max_tokens=1900, ignore_eos=True)
        try:
            async with asyncio.timeout(0.05):
                await side.aget("x")
        except TimeoutError:
            del side
        s += "Count: " + st.gen("y", max_tokens=1)
        return str(await s.aget("y"))

    assert isinstance(patient.run(backend=engine).ret_value, str)
