"""Calls that begin before a program makes them: who has their values, and what never does."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from waiting import PATIENCE_S, wait_until

from stemma.frontend.client.early_calls import (
    MAX_KEPT,
    MAX_RUNNING,
    EarlyCall,
    EarlyCalls,
    LikelyCall,
)


class Recorder:
    """A tool that waits until it may end, and knows what it was called with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.called: list[Any] = []
        self.may_end = threading.Event()
        self.error = error

    def __call__(self, value: Any) -> str:
        self.called.append(value)
        assert self.may_end.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return f"<{value}>"


def call_of(tool: Callable[..., Any], *args: Any, is_async: bool = False) -> LikelyCall:
    return LikelyCall(tool, tool, args, {}, is_async)


def tell(calls: EarlyCalls, *likely: LikelyCall) -> None:
    """A gen probably makes these."""
    calls.watcher(lambda text: likely, None)("a guess")


def taken(calls: EarlyCalls, tool: object, *args: Any) -> EarlyCall:
    found: list[EarlyCall] = []

    def take() -> bool:
        early = calls.take(tool, args, {})
        found.extend(() if early is None else (early,))
        return bool(found)

    wait_until(take)
    return found[0]


def test_a_true_call_has_the_value_of_the_equal_early_one_and_each_serves_one() -> None:
    calls, tool = EarlyCalls(), Recorder()
    tell(calls, call_of(tool, "Ulm"))
    early = taken(calls, tool, "Ulm")
    tool.may_end.set()
    assert early.future.result(PATIENCE_S) == ("<Ulm>",)
    calls.note_use(early, early.began_s + 2.0)
    assert (calls.counts.num_begun, calls.counts.num_used) == (1, 1)
    assert calls.take(tool, ("Ulm",), {}) is None and tool.called == ["Ulm"]


@pytest.mark.parametrize("other", [True, 1.0, "1", (1,), [1], None, 2])
def test_a_call_with_other_arguments_or_of_another_tool_has_nothing_of_it(other: Any) -> None:
    calls, tool = EarlyCalls(), Recorder()
    tell(calls, call_of(tool, 1))
    wait_until(lambda: bool(calls))
    assert calls.take(tool, (other,), {}) is None
    assert calls.take(Recorder(), (1,), {}) is None
    assert calls.take(tool, (1,), {}) is not None
    tool.may_end.set()


def test_one_that_raises_counts_as_never_made() -> None:
    calls, tool = EarlyCalls(), Recorder(OSError("not on this thread"))
    tool.may_end.set()
    tell(calls, call_of(tool, "Ulm"))
    early = taken(calls, tool, "Ulm")
    assert early.future.result(PATIENCE_S) is None
    calls.note_use(early, early.began_s)
    assert (calls.counts.num_used, calls.counts.num_failed) == (0, 1)


def test_equal_guesses_begin_one_call_and_no_more_run_than_may() -> None:
    calls, tool = EarlyCalls(), Recorder()
    tell(calls, call_of(tool, 0), call_of(tool, 0))
    wait_until(lambda: tool.called == [0])
    tell(calls, *[call_of(tool, i) for i in range(MAX_RUNNING + 4)])
    wait_until(lambda: len(tool.called) == MAX_RUNNING)
    tool.may_end.set()
    assert calls.counts.num_begun == MAX_RUNNING and sorted(tool.called) == [*range(MAX_RUNNING)]


def test_what_nobody_asks_for_is_forgotten_in_the_end() -> None:
    calls, tool = EarlyCalls(), Recorder()
    tool.may_end.set()
    for i in range(MAX_KEPT + 3):
        tell(calls, call_of(tool, i))
        wait_until(lambda i=i: len(tool.called) == i + 1)  # type: ignore[misc]
    assert calls.take(tool, (2,), {}) is None and calls.take(tool, (3,), {}) is not None


def test_a_guess_that_cannot_be_read_begins_nothing() -> None:
    calls = EarlyCalls()

    def read(text: str) -> Iterable[LikelyCall]:
        raise ValueError(text)

    calls.watcher(read, None)("no call")
    wait_until(lambda: calls.counts.num_unread == 1)
    assert not calls


def test_nothing_begins_once_the_program_has_ended_and_coroutines_are_cancelled() -> None:
    async def main() -> None:
        calls, begun, ended = EarlyCalls(), asyncio.Event(), asyncio.Event()

        async def tool() -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        told = calls.watcher(
            lambda text: [call_of(tool, is_async=True)], asyncio.get_running_loop()
        )
        told("a guess")
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        early = calls.take(tool, (), {})
        calls.close()
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        assert early is not None
        assert await asyncio.wait_for(asyncio.wrap_future(early.future), PATIENCE_S) is None
        late = Recorder()
        tell(calls, call_of(late, 1))
        assert not calls and not late.called

    asyncio.run(main())


def test_context_variables_are_those_of_the_program() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    calls, seen = EarlyCalls(), list[str]()

    def tool() -> None:
        seen.append(variable.get())

    variable.set("inside")
    told = calls.watcher(lambda text: [call_of(tool)], None)
    threading.Thread(target=functools.partial(told, "a guess")).start()
    wait_until(lambda: seen == ["inside"])
