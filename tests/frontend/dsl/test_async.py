"""Async programs: functions that are coroutines, and plain ones run from async code."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from dsl_programs import GREEDY, collector_at_rest, two_gens
from recording_channel import PlayedChannel, answer_all

import stemma as st
from stemma.frontend.protocol import ir

pytestmark = pytest.mark.usefixtures("no_test_hangs")


@st.function
async def chain(s: st.ProgramState, question: str) -> str:
    s += "Q: " + question + " A: "
    s += st.gen("first", max_tokens=6, **GREEDY) + " so "
    first = await s.aget("first")
    s += st.gen("second", max_tokens=4, **GREEDY)
    assert (await s.aget_meta_info("second"))["completion_tokens"] == 4
    assert await s.atext() == f"Q: {question} A: {first} so {await s.aget('second')}"
    return str(first)


@st.function
async def waiting(s: st.ProgramState, i: int) -> str:
    s += st.user(f"number {i}") + st.gen("x")
    return f"{await s.aget('x')} {i} {(await s.amessages())[0]['content']}"


@pytest.mark.usefixtures("default_engine")
def test_an_async_program_says_what_the_plain_one_says() -> None:
    wanted = two_gens.run("why?")
    assert chain.run("why?").text() == wanted.text()
    assert asyncio.run(chain.arun("why?")).ret_value == wanted["first"]
    assert asyncio.run(two_gens.arun("why?")).text() == wanted.text()
    questions = [{"question": q} for q in ("why?", "who?", "why?")]
    texts = [state.text() for state in two_gens.run_batch(questions)]
    assert [state.text() for state in chain.run_batch(questions)] == texts
    for fn in (chain, two_gens):
        assert [s.text() for s in asyncio.run(fn.arun_batch(questions))] == texts


@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("fn", [chain, two_gens], ids=["async", "plain"])
def test_a_stream_is_read_in_async_code(fn: st.Function) -> None:
    async def read() -> tuple[list[str], list[str], str]:
        state = await fn.astream("stream")
        second = asyncio.create_task(collected(state, "second"))
        return await collected(state, None), await second, await state.atext()

    async def collected(state: st.ProgramState, name: str | None) -> list[str]:
        return [chunk async for chunk in state.text_async_iter(name)]

    pieces, second, text = asyncio.run(read())
    assert "".join(pieces) == text == two_gens.run("stream").text()
    assert text.endswith("".join(second))


@pytest.mark.usefixtures("default_engine")
def test_a_stream_of_a_value_ends_with_its_meta_data_where_that_is_asked_for() -> None:
    async def read() -> list[Any]:
        state = two_gens.stream("meta")
        return [pair async for pair in state.text_async_iter("first", return_meta_data=True)]

    *pieces, (last, meta) = asyncio.run(read())
    assert pieces and last == "" and meta["completion_tokens"] == 6
    counts = [told["completion_tokens"] for _, told in pieces]
    assert counts == sorted(counts) and counts[-1] == 6  # all may come of one step
    told = pieces[-1][1]
    assert told["finish_reason"] is None
    assert {name: meta[name] for name in ("id", "prompt_tokens", "cached_tokens")} == {
        name: told[name] for name in ("id", "prompt_tokens", "cached_tokens")
    }


def test_an_async_stream_is_read_from_another_thread() -> None:
    channel = PlayedChannel()
    state = waiting.stream(i=1, backend=channel.backend)
    assert "".join(state.text_iter()) == "[user]number 1[end]<x>"


def test_ten_thousand_async_programs_wait_at_once_without_threads() -> None:
    @st.function
    async def program(s: st.ProgramState, i: int) -> str:
        s += str(i) + st.gen("x")
        return f"{await s.aget('x')} {i}"

    channel = PlayedChannel(is_delayed=True)
    num_threads = threading.active_count()
    most_threads = 0

    async def run() -> list[st.ProgramState]:
        nonlocal most_threads
        batch = asyncio.create_task(
            program.arun_batch([{"i": i} for i in range(10_000)], backend=channel.backend)
        )
        while len(channel.num_flushes) < 10_000:
            await asyncio.sleep(0.01)
        most_threads = threading.active_count()
        while not batch.done():
            channel.deliver_all()
            await asyncio.sleep(0.01)
        return await batch

    with collector_at_rest():
        states = asyncio.run(run())
    assert states[9_999].ret_value == "<x> 9999"
    assert most_threads <= num_threads + 1


def test_a_wait_that_would_stop_the_loop_is_refused_with_the_way_out() -> None:
    @st.function
    async def program(s: st.ProgramState) -> None:
        s += st.gen("x")
        s["x"]

    channel = PlayedChannel(is_delayed=True)
    with pytest.raises(st.InvalidProgram, match=r"await s\.aget"):
        asyncio.run(program.arun(backend=channel.backend))
    assert channel.closed == [1]


def test_run_inside_a_loop_says_what_to_call_instead() -> None:
    async def main() -> None:
        with pytest.raises(st.InvalidProgram, match=r"await fn\.arun"):
            waiting.run(i=1, backend=PlayedChannel().backend)
        with pytest.raises(st.InvalidProgram, match=r"await fn\.arun_batch"):
            waiting.run_batch([{"i": 1}], backend=PlayedChannel().backend)

    asyncio.run(main())


def test_tools_of_async_programs_let_the_others_go_on() -> None:
    barrier = threading.Barrier(3, timeout=60)

    @st.tool
    async def upper(text: str) -> str:
        await asyncio.sleep(0)
        return text.upper()

    @st.function
    async def program(s: st.ProgramState, i: int) -> str:
        async with s.pause(1):
            await asyncio.sleep(0)
        await s.acall(barrier.wait)
        return str(await s.call(upper, "a") + await upper(s, "b") + await s.acall(upper, "c"))

    channel = PlayedChannel()
    states = program.run_batch([{"i": i} for i in range(3)], backend=channel.backend)
    assert [state.ret_value for state in states] == ["ABC"] * 3
    assert [op.label for op in channel.ops[1] if isinstance(op, ir.Pause)] == [
        "", "wait", "upper", "upper", "upper",
    ]  # fmt: skip


def test_errors_of_async_programs_are_raised_at_the_await_and_named_in_a_batch() -> None:
    def answer(op: ir.Op) -> Any:
        if isinstance(op, ir.Gen) and op.params.max_tokens == 0:
            return "failed", {"message": "max_tokens=0", "kind": "InvalidRequest", "op": "x"}
        return answer_all(op)

    @st.function
    async def program(s: st.ProgramState, num: int) -> None:
        s += st.gen("x", max_tokens=num)
        if num == 0:
            with pytest.raises(st.ProgramError, match="max_tokens=0"):
                await s.adone()
        if num == 7:
            raise LookupError("the author's own")
        await s.aget("x")

    backend = PlayedChannel(answer).backend
    with pytest.raises(st.BatchError, match="2 of 3") as caught:
        program.run_batch([{"num": num} for num in (0, 1, 7)], backend=backend)
    assert [type(error) for error in caught.value.errors.values()] == [st.ProgramError, LookupError]


@st.function
def plain(s: st.ProgramState, i: int) -> str:
    s += st.user(f"number {i}") + st.gen("x")
    return str(s["x"])


@pytest.mark.parametrize("is_batch", [False, True], ids=["run", "batch"])
@pytest.mark.parametrize("fn", [waiting, plain], ids=["async", "plain"])
def test_a_cancelled_task_cancels_its_program(fn: st.Function, is_batch: bool) -> None:
    channel = PlayedChannel(is_delayed=True)

    async def main() -> None:
        options = {"backend": channel.backend}
        run = fn.arun_batch([[1]], **options) if is_batch else fn.arun(i=1, **options)
        task: asyncio.Task[Any] = asyncio.create_task(run)  # type: ignore[arg-type]
        while not channel.num_flushes[1]:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert channel.closed and set(channel.closed) == {1}


def test_the_outcome_of_a_hint_can_be_awaited_and_generators_work() -> None:
    @st.function
    async def program(s: st.ProgramState, i: int) -> str:
        s += "text"
        return str((await s.pin(1).aoutcome())["outcome"])

    batch = program.run_batch(
        [{"i": 1}, {"i": 2}], generator_style=True, backend=PlayedChannel().backend
    )
    assert [state.ret_value for state in batch] == ["accepted"] * 2
