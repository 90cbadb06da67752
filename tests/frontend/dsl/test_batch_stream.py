"""Batches whose results come as they are done, are kept, and go on after a crash."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from engine_thread import Backend, engine_in_thread
from openai_stand_in import standing_in
from waiting import wait_until

import stemma as st
from stemma.frontend.dsl.batch_stream import BatchSummary
from stemma.frontend.openai.rate_limit import RateLimit


class Person(pydantic.BaseModel):
    name: str


@pytest.fixture(scope="module")
def engine() -> Iterator[Backend]:
    with engine_in_thread(num_threads=1, max_total_tokens=4096) as engine:
        yield engine


RUN: list[str] = []  # which questions were run


@st.function
def ask(s: st.ProgramState, question: str) -> str:
    RUN.append(question)
    s += st.user(question) + st.assistant(st.gen("answer", max_tokens=4, temperature=0))
    if question == "bad":
        raise LookupError("the author's own")
    return question.upper()


def questions(*names: str) -> list[dict[str, str]]:
    return [{"question": name} for name in names]


def test_results_come_from_any_iterable_and_can_be_read_and_pickled(engine: Backend) -> None:
    async def later() -> AsyncIterator[list[str]]:
        for name in "ab":
            yield [name]

    async def all_of(inputs: Any) -> list[st.Result]:
        return [result async for result in ask.stream_batch(inputs, backend=engine)]

    streams = [
        list(ask.stream_batch(({"question": name} for name in "ab"), backend=engine)),
        list(ask.stream_batch(later(), backend=engine)),
        asyncio.run(all_of(later())),
        asyncio.run(all_of(questions("a", "b"))),
    ]
    for results in streams:
        results.sort(key=lambda result: result.index)
        assert [result.ret_value for result in results] == ["A", "B"]
        again: st.Result = pickle.loads(pickle.dumps(results[0]))
        assert again["answer"] == again.text("answer") == results[0]["answer"] and again.names()
        assert again.messages()[0] == {"role": "user", "content": "a"}
        assert again.text() == str(again) and again["answer"] in again.text()
        assert again.get_meta_info("answer")["completion_tokens"] == again.tokens.completion == 4
        with pytest.raises(KeyError, match="no value called 'x'"):
            again["x"]


def test_what_is_in_the_store_is_not_run_again(engine: Backend, tmp_path: Path) -> None:
    store = tmp_path / "runs.sqlite"
    RUN.clear()
    asked = questions("a", "bad", "a", "b")
    with pytest.raises(st.BatchError, match=r"1 of 4 .*\n.*\[1\] the author's own") as raised:
        ask.run_batch(asked, backend=engine, store=store)
    assert [state is None for state in raised.value.states] == [False, True, False, False]
    first = [state["answer"] for state in raised.value.states if state is not None]
    assert sorted(RUN) == ["a", "a", "b", "bad"], "equal inputs are runs of their own"
    RUN.clear()
    again = ask.run_batch(
        iter([*asked, {"question": "c"}]), backend=engine, store=store, raise_errors=False
    )
    assert sorted(RUN) == ["bad", "c"] and [r.is_stored for r in again] == [1, 0, 1, 1, 0]
    assert [r["answer"] for r in again if r.is_stored] == first
    assert isinstance(again[1].error(), LookupError)
    with pytest.raises(LookupError):
        again[1]["answer"]
    RUN.clear()
    ask.run_batch(asked[:1], backend=engine, store=store, max_tokens=3)
    assert RUN == ["a"], "another option is another run"


CRASHING = """
import os, sys, threading
import stemma as st

@st.function
def ask(s, number):
    s += st.user(f"Question {number}")
    s += st.assistant(st.gen("answer", max_tokens=4, temperature=1))
    with open(sys.argv[2], "a") as ran:
        ran.write(f"{number}\\n")

if __name__ == "__main__":
    st.set_default_backend(st.Engine(num_threads=1, max_total_tokens=4096))
    stream = ask.stream_batch([[n] for n in range(40)], store=sys.argv[1], max_in_flight=4)
    for count, result in enumerate(stream):
        print(result.index, result["answer"].encode().hex(), flush=True)
        if count == 11 and len(sys.argv) > 3:
            threading.Event().wait()  # until it is killed
"""


def test_a_batch_goes_on_where_its_process_was_killed(tmp_path: Path) -> None:
    script, store, ran = tmp_path / "crash.py", tmp_path / "runs.sqlite", tmp_path / "ran"
    script.write_text(CRASHING)
    command = [sys.executable, str(script), str(store), str(ran)]
    seen: dict[str, str] = {}
    with subprocess.Popen([*command, "waits"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in itertools.islice(process.stdout, 12):
            index, answer = line.split(maxsplit=1)
            seen[index] = answer
        process.send_signal(signal.SIGKILL)
    ran_before = ran.read_text().split()
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    after = dict(line.split(maxsplit=1) for line in done)
    assert len(after) == 40
    assert {index: after[index] for index in seen} == {i: a.strip() for i, a in seen.items()}
    ran_again = ran.read_text().split()[len(ran_before) :]
    assert not set(ran_again) & set(seen) and len(ran_again) <= 28


def test_at_most_so_many_are_in_flight(engine: Backend) -> None:
    lock, now, most = threading.Lock(), 0, 0
    taken: list[int] = []

    def inputs() -> Iterator[list[int]]:
        for number in range(60):
            taken.append(number)
            yield [number]

    @st.function
    def count(s: st.ProgramState, number: int) -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        s._program.on_end = ended
        s += f"{number}" + st.gen("x", max_tokens=8, ignore_eos=True)

    ending: set[int] = set()

    def ended(program: Any) -> None:
        nonlocal now
        with lock:
            if program.id not in ending and program._is_done:
                ending.add(program.id)
                now -= 1

    stream = count.stream_batch(inputs(), backend=engine, max_in_flight=3)
    next(stream)
    assert sum(1 for _ in stream) == 59 and most <= 3 and len(taken) == 60


def test_a_stream_that_is_given_up_leaves_nothing_running(engine: Backend) -> None:
    endless = ({"question": str(number)} for number in itertools.count())
    stream = ask.stream_batch(endless, backend=engine, max_in_flight=4)
    assert [next(stream) for _ in range(3)]
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)
    wait_until(lambda: engine.get_server_info()["num_programs"] == 0)

    async def some() -> None:
        stream = ask.stream_batch(endless, backend=engine, max_in_flight=4)
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(some())
    wait_until(lambda: engine.get_server_info()["num_programs"] == 0)


def test_an_input_that_raises_ends_the_stream_with_that(engine: Backend) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"question": "a"}
        raise OSError("the file has ended")

    with pytest.raises(OSError, match="the file has ended"):
        list(ask.stream_batch(broken(), backend=engine))
    (result,) = ask.stream_batch([7], backend=engine)
    assert isinstance(result.error(), st.InvalidProgram)


class _Given:
    """What `raising` raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@st.function
def raising(s: st.ProgramState, given: Any = None) -> None:
    s += "Hi" + st.gen("a", max_tokens=1)
    if given is not None:
        raise given.error


@st.function
async def raising_async(s: st.ProgramState, given: Any = None) -> None:
    s += "Hi" + st.gen("a", max_tokens=1)
    if given is not None:
        raise given.error


def _ended(work: Callable[[], Any], timeout_s: float = 60) -> Any:
    """What it returns, or raises; not to end would stop all tests."""
    ended: queue.Queue[Any] = queue.Queue()

    def run() -> None:
        try:
            ended.put(work())
        except BaseException as error:
            ended.put(error)

    threading.Thread(target=run, daemon=True).start()
    return ended.get(timeout=timeout_s)


@pytest.mark.parametrize("program", [raising, raising_async])
@pytest.mark.parametrize("error", [StopIteration(3), asyncio.CancelledError(), GeneratorExit()])
def test_what_would_end_a_coroutine_fails_its_program_alone(
    engine: Backend, program: st.Function, error: BaseException
) -> None:
    inputs = [[], [_Given(error)], []]
    results = _ended(lambda: sorted(program.stream_batch(inputs, backend=engine), key=_index))
    assert [type(r.error()) for r in results] == [type(None), RuntimeError, type(None)]
    assert type(error).__name__ in str(results[1].error())


def _index(result: st.Result) -> int:
    return result.index


def test_arun_of_a_plain_function_that_raises_stop_iteration_ends(engine: Backend) -> None:
    run = lambda: asyncio.run(raising.arun(_Given(StopIteration()), backend=engine))  # noqa: E731
    assert "raised StopIteration" in str(_ended(run))


@pytest.mark.parametrize("program", [raising, raising_async])
@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt()])
def test_what_ends_a_process_ends_the_stream(
    engine: Backend, program: st.Function, error: BaseException
) -> None:
    stream = program.stream_batch(([_Given(error)] for _ in range(3)), backend=engine)
    assert _ended(lambda: list(stream)) is error
    assert list(stream) == []


@pytest.mark.parametrize("error", [SystemExit(2), KeyboardInterrupt(), LookupError()])
def test_inputs_that_raise_anything_end_the_stream_with_it(
    engine: Backend, error: BaseException
) -> None:
    async def inputs() -> AsyncIterator[list[Any]]:
        yield []
        raise error

    found = _ended(lambda: list(raising.stream_batch(inputs(), backend=engine)))
    assert isinstance(found, type(error))


def test_a_result_comes_though_the_next_input_does_not(engine: Backend) -> None:
    """Whoever makes inputs may wait for results."""
    asked = threading.Event()

    def inputs() -> Iterator[list[Any]]:
        yield []
        asked.wait(60)

    stream = raising.stream_batch(inputs(), backend=engine)
    try:
        assert _ended(lambda: next(stream)).index == 0
        _ended(stream.close)
        assert _ended(lambda: list(stream)) == []
    finally:
        asked.set()


def test_an_async_generator_of_inputs_is_one_task(engine: Backend) -> None:
    """Over its yields it may hold open what belongs to a task, such as `asyncio.timeout`."""
    tasks: set[Any] = set()

    async def inputs() -> AsyncIterator[list[Any]]:
        async with asyncio.timeout(60):
            for _ in range(3):
                tasks.add(asyncio.current_task())
                yield []

    assert len(list(raising.stream_batch(inputs(), backend=engine))) == 3
    assert len(tasks) == 1


def test_several_threads_read_one_stream(engine: Backend) -> None:
    stream = raising.stream_batch([[] for _ in range(20)], backend=engine)
    found: list[int] = []

    def read() -> None:
        found.extend(result.index for result in stream)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and sorted(found) == [*range(20)]


def test_a_stream_ends_though_a_function_that_was_cut_off_blocks(engine: Backend) -> None:
    blocked = threading.Event()

    @st.function
    def blocks(s: st.ProgramState) -> None:
        blocked.wait()

    try:
        results = _ended(lambda: list(blocks.stream_batch([[]], backend=engine, timeout=0.01)))
        assert isinstance(results[0].error(), TimeoutError)
    finally:
        blocked.set()


def test_a_summary_counts_tokens_and_cost(
    engine: Backend, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.flush_cache()
    prices = st.Prices(prompt=1e6, completion=2e6, cached=0)
    stream = ask.stream_batch(
        questions("a", "a", "bad"), backend=engine, max_in_flight=1, prices=prices,
        progress_bar=True,
    )  # fmt: skip
    tokens = [result.tokens for result in stream]
    summary = stream.summary
    assert (summary.num_done, summary.num_failed, summary.num_stored) == (3, 1, 0)
    assert summary.tokens.completion == sum(each.completion for each in tokens) >= 8
    assert 0 < summary.tokens.cached < summary.tokens.prompt
    computed = summary.tokens.prompt - summary.tokens.cached
    assert summary.cost == computed + 2 * summary.tokens.completion
    assert "3 done in" in str(summary) and "1 failed" in str(summary) and "cost" in str(summary)
    assert "hits" in capfd.readouterr().err and BatchSummary().cost is None


def test_a_file_that_is_no_store_is_refused(engine: Backend, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    other.write_text("no database at all, but long enough to be looked at as one" * 20)
    with pytest.raises(st.InvalidRequest, match="store="):
        ask.run_batch(questions("a"), backend=engine, store=other)
    with pytest.raises(st.InvalidRequest, match="store="):
        ask.run_batch(questions("a"), backend=engine, store=tmp_path / "no" / "folder")


def test_what_cannot_be_kept_fails_alone_and_says_what_it_is(
    engine: Backend, tmp_path: Path
) -> None:
    @st.function
    def odd(s: st.ProgramState, value: Any) -> None:
        s["lock"] = threading.Lock() if value else 1

    store = tmp_path / "runs.sqlite"
    results = odd.run_batch([[0], [1]], backend=engine, store=store, raise_errors=False)
    assert results[0]["lock"] == 1
    assert "store: the value 'lock' cannot be pickled" in str(results[1].error())
    inputs = [[threading.Lock()], [0]]
    results = odd.run_batch(inputs, backend=engine, store=store, raise_errors=False)
    assert "arguments that cannot be compared" in str(results[0].error())
    assert results[1]["lock"] == 1


def test_a_function_with_a_cache_is_run_once(engine: Backend, tmp_path: Path) -> None:
    path = tmp_path / "cache.sqlite"
    runs: list[Any] = []

    @st.function(cache=path)
    def extract(s: st.ProgramState, text: str, person: Person | None = None) -> None:
        runs.append(text)
        s += st.user(f"Text: {text}\nExtract name as JSON.")
        s += st.assistant(st.gen("person", type=Person))

    first = extract.run("Ada Moor is old.", person=Person(name="x"), backend=engine)
    again = extract.run("Ada Moor is old.", person=Person(name="x"), backend=engine)
    other = extract.run("Ada Moor is old.", person=Person(name="y"), backend=engine)
    assert isinstance(again["person"], Person) and first["person"] == again["person"]
    assert (first.is_stored, again.is_stored, other.is_stored) == (False, True, False)
    assert asyncio.run(extract.arun("Ada Moor is old.", backend=engine, temperature=0)) is not None
    assert len(runs) == 3
    with sqlite3.connect(path) as file:
        file.execute("update stemma_results set result = x'00'")
    assert not extract.run("Ada Moor is old.", person=Person(name="x"), backend=engine).is_stored


def test_calls_to_an_endpoint_keep_to_a_rate() -> None:
    async def taken(limit: RateLimit, amounts: list[float]) -> list[float]:
        loop, times = asyncio.get_running_loop(), []
        for amount in amounts:
            await limit.take(amount)
            times.append(loop.time())
        return [time - times[0] for time in times]

    times = asyncio.run(taken(RateLimit(600), [1] * 15))
    assert times[14] >= 0.28, "600 a minute are one each 0.1 s, behind a second's worth at once"
    assert asyncio.run(taken(RateLimit(None), [1e9] * 3))[2] < 1
    with standing_in() as server:
        for rate in (0, -1, float("nan"), "7"):
            with pytest.raises(st.InvalidRequest, match="requests_per_minute"):
                st.OpenAI("m", base_url=server.url, requests_per_minute=rate)  # type: ignore[arg-type]
        backend = st.OpenAI(
            "m", base_url=server.url, api_key="k", is_chat_model=True,
            requests_per_minute=6000, tokens_per_minute=1e6,
        )  # fmt: skip
        ask.run_batch(questions(*"abc"), backend=backend)
        assert len(server.bodies) == 3
