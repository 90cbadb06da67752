"""Batches by themselves: on which threads functions run, how many at once, and how they end."""

from __future__ import annotations

import contextvars
import resource
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from dsl_programs import collector_at_rest
from recording_channel import PlayedChannel

import stemma as st
from stemma.frontend.dsl.batch import Relay

pytestmark = pytest.mark.usefixtures("no_test_hangs")


@st.function
def one_gen(s: st.ProgramState, i: int) -> int:
    s += f"number {i}" + st.gen("x")
    return i


@st.function
def waiting(s: st.ProgramState, i: int) -> str:
    s += f"number {i}" + st.gen("x")
    return f"{s['x']} {i}"


def numbers(count: int) -> list[dict[str, int]]:
    return [{"i": i} for i in range(count)]


def test_programs_that_never_wait_run_on_the_calling_thread_alone() -> None:
    channel = PlayedChannel()
    states = one_gen.run_batch(numbers(500), backend=channel.backend)
    assert [state.ret_value for state in states] == list(range(500))
    assert channel.sending_threads == {threading.get_ident()}


def test_ten_thousand_programs_are_in_flight_from_one_thread_within_bounds() -> None:
    """All of them, sent before anything is answered, on no thread of their own."""
    channel = PlayedChannel(is_delayed=True)
    most_threads = 0

    def answer_when_all_are_sent() -> None:
        nonlocal most_threads
        while sum(channel.num_flushes.values()) < 10_000:
            most_threads = max(most_threads, threading.active_count())
            time.sleep(0.02)
        channel.deliver_all()

    before, num_threads = resource.getrusage(resource.RUSAGE_SELF), threading.active_count()
    helper = threading.Thread(target=answer_when_all_are_sent)
    helper.start()
    with collector_at_rest():
        states = one_gen.run_batch(numbers(10_000), backend=channel.backend)
    helper.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert states[-1]["x"] == "<x>" and states[5_000].ret_value == 5_000
    assert most_threads <= num_threads + 3, "the helper, a watch, perhaps one more for a stall"
    assert after.ru_maxrss - before.ru_maxrss < 150 * 1024, "KiB: 15 KiB a program"


def test_functions_that_wait_share_a_bounded_number_of_threads() -> None:
    channel = PlayedChannel(is_threaded=True)
    states = waiting.run_batch(numbers(200), num_threads=3, backend=channel.backend)
    assert [state.ret_value for state in states] == [f"<x> {i}" for i in range(200)]
    assert 1 <= len(channel.sending_threads) <= 3
    channel.close()


def test_one_thread_is_enough_for_functions_that_wait() -> None:
    channel = PlayedChannel(is_threaded=True)
    states = waiting.run_batch(numbers(20), num_threads=1, backend=channel.backend)
    assert [state["x"] for state in states] == ["<x>"] * 20
    assert channel.sending_threads == {threading.get_ident()}
    channel.close()


def test_waits_of_different_programs_overlap() -> None:
    """None of eight is answered before all eight wait."""
    channel = PlayedChannel(is_delayed=True)
    waiter = threading.Thread(
        target=lambda: waiting.run_batch(numbers(8), num_threads=8, backend=channel.backend)
    )
    waiter.start()
    while sum(channel.num_flushes.values()) < 8:
        time.sleep(0.005)
    while waiter.is_alive():
        channel.deliver_all()
        time.sleep(0.005)


@pytest.mark.parametrize("is_paused", [True, False])
def test_functions_that_block_in_their_own_way_overlap(is_paused: bool) -> None:
    """In a tool at once; elsewhere as soon as it is noticed."""
    barrier = threading.Barrier(8, timeout=60)

    @st.function
    def program(s: st.ProgramState, i: int) -> None:
        if is_paused:
            s.call(barrier.wait)
        else:
            barrier.wait()

    program.run_batch(numbers(8), backend=PlayedChannel().backend)


def test_threads_of_a_batch_see_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the caller's")

    @st.function
    def program(s: st.ProgramState, i: int) -> str:
        s += st.gen("x")
        s.sync()
        return variable.get()

    channel = PlayedChannel(is_threaded=True)
    for style in (False, True):
        states = program.run_batch(numbers(9), generator_style=style, backend=channel.backend)
        assert [state.ret_value for state in states] == ["the caller's"] * 9
    channel.close()


def test_a_generator_yields_in_order_and_before_all_are_done() -> None:
    channel = PlayedChannel(is_delayed=True)
    states: Iterator[st.ProgramState] = one_gen.run_batch(
        numbers(4), generator_style=True, backend=channel.backend
    )
    while sum(channel.num_flushes.values()) < 4:
        time.sleep(0.005)
    channel.deliver(3)
    channel.deliver(1)
    assert next(states).ret_value == 0
    channel.deliver(2)
    assert [next(states).ret_value for _ in range(2)] == [1, 2]
    channel.deliver(4)
    assert [state.ret_value for state in states] == [3]


def test_a_generator_that_is_left_early_cancels_the_rest() -> None:
    channel = PlayedChannel(is_delayed=True)
    states = one_gen.run_batch(numbers(3), generator_style=True, backend=channel.backend)
    while sum(channel.num_flushes.values()) < 3:
        time.sleep(0.005)
    channel.deliver(1)
    next(states)
    states.close()
    assert sorted(channel.closed) == [2, 3]


def test_a_generator_names_those_that_failed_at_its_end() -> None:
    @st.function
    def program(s: st.ProgramState, i: int) -> int:
        return 1 // i

    seen = []
    with pytest.raises(st.BatchError, match="1 of 3"):
        for state in program.run_batch(
            numbers(3), generator_style=True, backend=PlayedChannel().backend
        ):
            seen.append(type(state.error()))
    assert seen == [ZeroDivisionError, type(None), type(None)]


def test_arguments_may_be_lists_in_the_functions_order() -> None:
    @st.function
    def program(s: st.ProgramState, a: int, b: int = 2) -> list[int]:
        return [a, b]

    states = program.run_batch([(1,), [3, 4], {"a": 5}], backend=PlayedChannel().backend)
    assert [state.ret_value for state in states] == [[1, 2], [3, 4], [5, 2]]
    with pytest.raises(st.BatchError, match="a mapping or a list"):
        program.run_batch(["ab"], backend=PlayedChannel().backend)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_stops_the_batch_and_leaves_nothing_running(error: Any) -> None:
    @st.function
    def program(s: st.ProgramState, i: int) -> None:
        s += st.gen("x")
        if i == 5:
            raise error
        s.sync()

    channel = PlayedChannel(is_delayed=True)
    with pytest.raises(error):
        program.run_batch(numbers(10), backend=channel.backend)
    assert sorted(channel.closed) == list(range(1, 11))


def test_a_relay_calls_each_once_whatever_waits() -> None:
    called: list[int] = []
    relay: Relay

    def execute(index: int) -> None:
        called.append(index)
        if index % 3 == 0:
            with relay.released():
                time.sleep(0.001)
        elif index % 50 == 1:
            time.sleep(0.03)  # blocks unnoticed

    relay = Relay(300, execute, 7)
    relay.run()
    assert sorted(called) == list(range(300))
