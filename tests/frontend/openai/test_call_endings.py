"""Calls to a server of OpenAI's API that fail, are given up or cancelled, and many at once."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import openai_stand_in
import pytest
from openai_stand_in import StandIn, ask, refusal
from waiting import wait_until

import stemma as st
from stemma.errors import EngineError, ProgramError

# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_tried_again(
    status: int, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(status), refusal(status)]
    state = ask.run(backend=connect())
    assert state["a"] == "hello"
    assert state.get_meta_info("a")["num_retries"] == 2
    assert len(server.bodies) == 3


def test_a_server_that_says_when_to_come_back_is_obeyed(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(429, **{"retry-after": "0.3"})]
    started = time.monotonic()
    assert ask.run(backend=connect())["a"] == "hello"
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_tried_again_and_names_the_line(
    status: int, server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(status, "temperature: too hot")]
    with pytest.raises(ProgramError, match=f"HTTP {status}: temperature: too hot") as caught:
        ask.run(backend=connect())
    assert (caught.value.kind, caught.value.op) == ("InvalidRequest", "a")
    assert caught.value.source is not None and openai_stand_in.__file__ in caught.value.source
    assert len(server.bodies) == 1


def test_a_failure_that_stays_is_an_error_after_all_attempts(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = [refusal(503, "busy") for _ in range(9)]
    with pytest.raises(ProgramError, match="HTTP 503: busy") as caught:
        ask.run(backend=connect(max_retries=2))
    assert caught.value.kind == "EngineError"
    assert len(server.bodies) == 3


def test_a_stream_that_breaks_before_it_begins_is_tried_again(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.failures = ["break"]
    state = ask.stream(backend=connect())
    assert "".join(state.text_iter("a")) == "hello"
    assert len(server.bodies) == 2


def test_a_silent_server_is_given_up(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 60
    with pytest.raises(ProgramError, match="ReadTimeout"):
        ask.run(backend=connect(timeout=1.0, max_retries=1))
    assert len(server.bodies) == 2


def test_a_deadline_ends_the_call(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 60
    with pytest.raises(ProgramError, match=r"0\.1") as caught:
        ask.run(deadline=0.1, backend=connect())
    assert caught.value.kind == "DeadlineExceeded"
    wait_until(lambda: server.num_closed_early == 1)


def test_no_server_is_an_error_with_its_address() -> None:
    with st.OpenAI("some", base_url="http://127.0.0.1:9/v1", max_retries=0) as backend:
        with pytest.raises(ProgramError, match=r"127\.0\.0\.1:9"):
            ask.run(backend=backend)
    with pytest.raises(EngineError, match="did not answer"):
        st.Runtime("http://127.0.0.1:9")


def test_an_answer_that_is_none_of_openais_is_an_error(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    from fastapi.responses import JSONResponse

    server.failures = [JSONResponse({"choices": [{"index": 7, "message": {"content": "x"}}]})]
    with pytest.raises(ProgramError, match="none of OpenAI's"):
        ask.run(backend=connect())
    message = {"role": "assistant", "content": None, "refusal": "I will not"}
    server.failures = [JSONResponse({"choices": [{"index": 0, "message": message}]})]
    with pytest.raises(ProgramError, match="the model refused: I will not"):
        ask.run(backend=connect())


def test_cancelling_closes_the_request(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 10
    state = ask.stream(backend=connect())
    wait_until(lambda: server.num_open == 1)
    state.cancel()
    wait_until(lambda: server.num_closed_early == 1 and server.num_open == 0)


def test_shutting_down_ends_programs_and_the_thread(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.delay_s = 10
    backend = connect()
    state = ask.stream(backend=backend)
    wait_until(lambda: server.num_open == 1)
    backend.shutdown()
    backend.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        state["a"]
    with pytest.raises(EngineError, match="shut down"):
        ask.run(backend=backend)
    assert not backend.channel._thread.is_alive()


# --- many -----------------------------------------------------------------------------------------


def test_calls_under_way_are_bounded(server: StandIn, connect: Callable[..., st.OpenAI]) -> None:
    server.delay_s = 0.02
    backend = connect(max_concurrency=4)
    states = ask.run_batch([{}] * 20, backend=backend)
    assert [state["a"] for state in states] == ["hello"] * 20
    assert 2 <= server.max_open <= 4, "as many as the machine's pace allows"
    assert max(state.get_meta_info("a")["queue_s"] for state in states) > 0.02


def test_a_loser_of_a_join_is_an_error_where_it_is_read(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    @st.function
    def race(s: st.ProgramState) -> None:
        s += st.user("Hi")
        forks = s.fork(2)
        for fork in forks:
            fork += st.assistant(st.gen("tip"))
        forks.join(st.first(1))
        assert s["tip"] == ["hello"]
        with pytest.raises(ProgramError, match="the join had enough branches"):
            forks[1]["tip"]

    server.delay_s = 0.1
    race.run(backend=connect(max_concurrency=1)).sync()


def test_a_backend_that_ends_behind_an_answer_leaves_no_task_of_its_loop(
    server: StandIn, connect: Callable[..., st.OpenAI], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(8):
        backend = connect()
        list(ask.stream(backend=backend).text_iter())
        backend.shutdown()
        gc.collect()
    assert not caplog.records, "such as: Task was destroyed but it is pending!"


def test_programs_in_flight_need_no_threads(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    from stemma.frontend.dsl.function import open_program

    backend = connect(max_concurrency=1)
    server.delay_s = 30
    before = threading.active_count()
    states = [open_program(backend) for _ in range(1000)]
    for state in states:
        state += st.user("Hi") + st.assistant(st.gen("a"))
    wait_until(lambda: server.num_open == 1)
    assert threading.active_count() <= before + 1  # the stand-in may have started one
    for state in states:
        state.cancel()
    wait_until(lambda: server.num_open == 0)


def test_async_programs_wait_for_each_other_on_one_thread(
    server: StandIn, connect: Callable[..., st.OpenAI]
) -> None:
    server.answer = lambda body: body["messages"][-1]["content"]

    @st.function
    async def twice(s: st.ProgramState, number: int) -> None:
        s += st.user(f"first {number}") + st.assistant(st.gen("a"))
        said = await s.aget("a")
        s += st.user(f"again {said}") + st.assistant(st.gen("b"))

    states = twice.run_batch([{"number": n} for n in range(50)], backend=connect())
    assert [state["b"] for state in states] == [f"again first {n}" for n in range(50)]
