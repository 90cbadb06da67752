"""What nobody can reach any more is stopped: batches, streams, and forks while a function waits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from dsl_programs import GREEDY, wait_until_idle
from recording_channel import PlayedChannel

import stemma as st
from stemma.frontend.protocol import ir

pytestmark = pytest.mark.usefixtures("no_test_hangs")


@st.function
def waiting(s: st.ProgramState, i: int = 0) -> str:
    s += f"number {i}" + st.gen("x")
    return str(s["x"])


@st.function
async def waiting_async(s: st.ProgramState, i: int = 0) -> str:
    s += f"number {i}" + st.gen("x")
    return str(await s.aget("x"))


BOTH = pytest.mark.parametrize("fn", [waiting, waiting_async], ids=["plain", "async"])


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("stemma-b")]


# --- batches --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("num_taken", [0, 1])
@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_a_batch_whose_iterator_is_given_up_is_cancelled(
    fn: st.Function, num_taken: int, how: str
) -> None:
    channel = PlayedChannel(is_delayed=True)
    num_threads = len(threads())
    states = fn.run_batch(
        [{"i": i} for i in range(20)], generator_style=True, backend=channel.backend
    )
    until(lambda: len(channel.num_flushes) == 20)
    if num_taken:
        channel.deliver(1)
        until(lambda: channel.num_flushes[1] == 2)  # the end of its function
        channel.deliver(1)
        assert next(states)["x"] == "<x>"
    if how == "closed":
        states.close()
        assert sorted(channel.closed) == list(range(1 + num_taken, 21)), "at once"
        assert list(states) == []
    del states
    until(lambda: sorted(channel.closed) == list(range(1 + num_taken, 21)))
    until(lambda: len(threads()) == num_threads)


def test_an_iterator_that_has_ended_or_was_closed_cancels_nothing_more() -> None:
    channel = PlayedChannel()
    states = waiting.run_batch([{"i": 1}, {"i": 2}], generator_style=True, backend=channel.backend)
    assert iter(states) is states and [state["x"] for state in states] == ["<x>", "<x>"]
    assert next(states, None) is None
    states.close()
    states.close()
    del states
    assert waiting.run_batch([], generator_style=True, backend=channel.backend).close() is None
    assert channel.closed == []


def test_giving_up_a_batch_takes_no_lock() -> None:
    """A garbage collector may do it in the middle of anything."""
    channel = PlayedChannel(is_delayed=True)
    states = waiting.run_batch([{"i": i} for i in range(3)], generator_style=True, num_threads=3,
                               backend=channel.backend)  # fmt: skip
    until(lambda: len(channel.num_flushes) == 3)
    batch = states._batch
    with contextlib.ExitStack() as locks:
        locks.enter_context(batch._relay._lock)
        for state in batch.states:
            locks.enter_context(state._program.waiters.lock)
        del states
    until(lambda: sorted(channel.closed) == [1, 2, 3])


# --- streams --------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("is_read", [False, True])
def test_a_stream_that_its_reader_gives_up_is_cancelled(fn: st.Function, is_read: bool) -> None:
    channel = PlayedChannel(is_delayed=True)
    state = fn.stream(backend=channel.backend)
    lock, pieces = state._program.waiters.lock, state.text_iter()
    if is_read:
        assert next(pieces) == "number 0"
    until(lambda: channel.num_flushes)
    del state
    gc.collect()
    assert channel.closed == [], "its iterator is still there"
    with lock:
        del pieces
    until(lambda: channel.closed == [1])


@BOTH
def test_an_async_stream_that_is_left_early_is_cancelled(fn: st.Function) -> None:
    channel = PlayedChannel(is_delayed=True)

    async def read() -> None:
        async for piece in (await fn.astream(backend=channel.backend)).text_async_iter():
            assert piece == "number 0"
            break
        while not channel.closed:
            await asyncio.sleep(0.002)

    asyncio.run(read())
    assert channel.closed == [1]


@BOTH
def test_a_stream_whose_state_is_kept_goes_on_without_its_iterator(fn: st.Function) -> None:
    channel = PlayedChannel(is_delayed=True)

    async def read() -> st.ProgramState:
        state = await fn.astream(backend=channel.backend)
        pieces = state.text_async_iter()
        assert await anext(pieces) == "number 0"
        await pieces.aclose()
        while not channel.num_flushes[1]:
            await asyncio.sleep(0.002)
        channel.deliver(1)
        assert await state.aget("x") == "<x>"
        while channel.num_flushes[1] < 2 and not state._program.is_ended:
            await asyncio.sleep(0.002)
        return state

    state = asyncio.run(read())
    gc.collect()
    assert channel.closed == [] and state["x"] == "<x>"


def test_the_state_of_a_stream_is_the_functions_own_in_all_that_can_be_read() -> None:
    inner: list[st.ProgramState] = []

    @st.function
    def program(s: st.ProgramState) -> str:
        inner.append(s)
        with s.user():
            s += "hello"
        s["known"] = 5
        return "value"

    channel = PlayedChannel()
    state = program.stream(backend=channel.backend)
    assert state.text() == inner[0].text() == "[user]hello[end]"
    assert state.messages() == inner[0].messages() and state["known"] == 5
    assert state.ret_value == "value" and state.error() is None
    del state
    time.sleep(0.05)
    assert channel.closed == [], "a program that is done is not cancelled"


@pytest.mark.usefixtures("default_engine")
def test_a_runtime_computes_no_more_for_a_stream_that_was_given_up() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q" + st.gen("x", max_tokens=3000, **GREEDY)

    engine = st.frontend.backend.get_default_backend()
    before = engine.get_server_info()["stats"]["num_computed_tokens"]
    pieces = program.stream().text_iter("x")
    assert next(pieces)
    del pieces
    wait_until_idle(engine)
    assert engine.get_server_info()["stats"]["num_computed_tokens"] - before < 2500


# --- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "async", "pause"])
def test_a_fork_is_dropped_while_its_function_waits(kind: str) -> None:
    forks: list[st.ProgramState] = []
    channel = PlayedChannel(is_delayed=True)
    go_on = threading.Event()

    @st.function
    def plain(s: st.ProgramState) -> None:
        begin(s)
        s.sync()

    @st.function
    async def coroutine(s: st.ProgramState) -> None:
        begin(s)
        await s.adone()

    @st.function
    def pause(s: st.ProgramState) -> None:
        begin(s)
        s.call(go_on.wait)

    def begin(s: st.ProgramState) -> None:
        forks.extend(s.fork(3))
        s += st.gen("x")

    fn = {"plain": plain, "async": coroutine, "pause": pause}[kind]
    runner = threading.Thread(target=lambda: fn.run(backend=channel.backend))
    runner.start()
    until(lambda: channel.num_flushes[1])
    until(lambda: forks and forks[0]._program._num_waits)
    with forks[0]._program.waiters.lock:  # the finalizer needs none
        del forks[1:]
    until(lambda: dropped(channel) == {2, 3})
    until(lambda: channel.num_flushes[1] > 1)
    go_on.set()
    while runner.is_alive():
        channel.deliver(1)
        time.sleep(0.002)
    forks.clear()
    time.sleep(0.02)
    assert dropped(channel) == {2, 3}, "what is left at the end is not dropped"


def test_forks_that_a_function_leaves_at_its_end_are_not_dropped_while_a_reader_waits() -> None:
    channel = PlayedChannel(is_threaded=True)

    @st.function
    def program(s: st.ProgramState) -> None:
        side = s.copy()
        side += st.gen("x")
        time.sleep(0.01)

    for _ in range(20):
        program.stream(backend=channel.backend).text()
    channel.close()
    assert not any(isinstance(op, ir.Drop) for ops in channel.ops.values() for op in ops)


@pytest.mark.usefixtures("default_engine")
def test_a_runtime_stops_a_fork_that_is_dropped_during_a_wait() -> None:
    forks: list[Any] = []

    def clear_once_it_waits(s: st.ProgramState) -> None:
        until(lambda: s._program._num_waits)
        forks.clear()

    @st.function
    def program(s: st.ProgramState) -> None:
        s += "q"
        forks.append(s.copy())
        forks[0].append(st.gen("long", max_tokens=3500, **GREEDY))
        clearing = threading.Thread(target=clear_once_it_waits, args=(s,))
        clearing.start()
        s += st.gen("x", max_tokens=600, **GREEDY)
        s.sync()
        clearing.join()

    engine = st.frontend.backend.get_default_backend()
    before = engine.get_server_info()["stats"]["num_computed_tokens"]
    program.run()
    assert engine.get_server_info()["stats"]["num_computed_tokens"] - before < 3000


def dropped(channel: PlayedChannel) -> set[int]:
    return {op.branch for op in channel.ops[1] if isinstance(op, ir.Drop)}
