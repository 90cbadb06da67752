"""Work on long texts beside the loop: whose turn it is, and what is reported."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from waiting import ready

from stemma.errors import EngineError
from stemma.runtime.programs.text_threads import TextThreads
from stemma.runtime.tokenizer.tokenizer import VERY_LONG_CHARS

HANGS_S = 60.0


class Text:
    """Something to tokenize, and whoever is told."""

    def encode(self) -> None: ...

    def take(self, outcome: object) -> None: ...


class Loop:
    """What the engine's loop does with its threads."""

    def __init__(self) -> None:
        self.threads = TextThreads()
        self.outcomes: list[Any] = []
        self.begun: list[str] = []
        self.gate = threading.Event()

    def start(self, run: Callable[[], Any], num_chars: int = 1, tenant: str = "") -> Any:
        return self.threads.start(run, self.outcomes.append, num_chars=num_chars, tenant=tenant)

    def block(self, num_chars: int = 1) -> None:
        """Occupy a thread until the gate opens."""
        is_running = threading.Event()
        self.start(lambda: (is_running.set(), self.gate.wait(HANGS_S))[1], num_chars)
        assert is_running.wait(HANGS_S)

    def named(self, name: str, tenant: str) -> None:
        self.start(lambda: self.begun.append(name) or name, tenant=tenant)  # type: ignore[func-returns-value]

    def collect(self, num_outcomes: int) -> list[Any]:
        while len(self.outcomes) < num_outcomes:
            assert ready([self.threads], HANGS_S), "nothing came"
            self.threads.collect()
        return self.outcomes


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.gate.set()
    loop.threads.close()


def test_tenants_take_turns(loop: Loop) -> None:
    loop.block()
    for number in range(3):
        loop.named(f"a{number}", "alice")
    loop.named("b0", "bob")
    loop.named("c0", "carol")
    loop.gate.set()
    loop.collect(6)
    assert loop.begun == ["a0", "b0", "c0", "a1", "a2"]


def test_no_text_waits_for_a_very_long_one(loop: Loop) -> None:
    loop.block(VERY_LONG_CHARS)
    loop.start(lambda: "very long", VERY_LONG_CHARS)
    loop.start(lambda: "long")
    assert loop.collect(1) == ["long"]
    loop.gate.set()
    assert loop.collect(3) == ["long", True, "very long"]


def test_an_aborted_job_is_not_begun_and_a_running_one_not_reported(loop: Loop) -> None:
    loop.block()
    waiting = loop.start(lambda: loop.begun.append("aborted"))
    waiting.abort()
    ran = threading.Event()
    running = loop.start(lambda: ran.set())
    loop.gate.set()
    assert ran.wait(HANGS_S)
    running.abort()
    loop.start(lambda: "last")
    assert loop.collect(2) == [True, "last"] and not loop.begun


def test_an_aborted_job_keeps_nothing_alive_while_it_waits(loop: Loop) -> None:
    loop.block()
    text, told = Text(), Text()
    held = [weakref.ref(text), weakref.ref(told)]
    job = loop.threads.start(text.encode, told.take, num_chars=1, tenant="")
    del text, told
    assert all(ref() is not None for ref in held)
    job.abort()
    assert [ref() for ref in held] == [None, None]


def test_errors_are_reported_and_the_thread_goes_on(loop: Loop) -> None:
    def fail() -> None:
        raise ValueError("broken")

    loop.start(fail)
    loop.start(lambda: "fine")
    error, fine = loop.collect(2)
    assert isinstance(error, ValueError) and fine == "fine"


def test_a_thread_that_cannot_start_is_an_error_and_tried_again(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(EngineError, match="can't start new thread"):
            loop.start(lambda: "never")
    loop.start(lambda: "later")
    assert loop.collect(1) == ["later"]
