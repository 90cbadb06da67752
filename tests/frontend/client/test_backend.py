"""A backend whose connection was lost: who opens it anew, who waits for that, and who does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from scripted_channel import ScriptedChannel
from waiting import PATIENCE_S, until, wait_until

import stemma as st
from stemma.errors import EngineError
from stemma.frontend import backend as frontend_backend
from stemma.frontend.client import backend as backend_module
from stemma.frontend.client.backend import Backend


class Lost(ScriptedChannel):
    """A channel as a connection that was lost."""

    loss: EngineError | None = EngineError("it was lost")
    is_closed = False

    def close(self) -> None:
        self.loss, self.is_closed = None, True


class Found(Lost):
    loss = None


class Reopened(Backend):
    """Opens `outcome`, once the gate is open."""

    def __init__(self, outcome: Lost | BaseException) -> None:
        super().__init__(Lost())
        self.outcome, self.num_attempts = outcome, 0
        self.gate, self.begun = threading.Event(), threading.Event()

    def _reopened(self) -> Any:
        self.num_attempts += 1
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "Connection", Lost)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def ask(backend: Backend) -> Any:
    """The channel, or why there is none."""
    try:
        return backend.channel
    except EngineError as error:
        return str(error)


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (EngineError("nobody answers"), "nobody answers; the last connection: it was lost"),
        (KeyboardInterrupt(), "the attempt to connect was interrupted; the last connection: "),
        (found := Found(), found),
    ],
    ids=["error", "interrupt", "channel"],
)
def test_who_waits_for_an_attempt_shares_its_outcome(
    threads: ThreadPoolExecutor, outcome: Any, told: Any
) -> None:
    backend = Reopened(outcome)
    first = threads.submit(ask, backend)
    assert backend.begun.wait(PATIENCE_S)
    others = [threads.submit(ask, backend) for _ in range(3)]
    wait_until(lambda: num_waiting_for(backend._attempt) == 4)
    backend.gate.set()
    for other in others:
        assert str(other.result(PATIENCE_S)).startswith(str(told))
    if isinstance(outcome, KeyboardInterrupt):
        assert isinstance(first.exception(PATIENCE_S), KeyboardInterrupt)
    else:
        assert first.result(PATIENCE_S) == told
    assert backend.num_attempts == 1


def num_waiting_for(attempt: Future[Any] | None) -> int:
    """With the one who carries it out."""
    return 0 if attempt is None else 1 + len(attempt._condition._waiters)  # type: ignore[attr-defined]


def test_an_attempt_that_failed_is_followed_by_another() -> None:
    backend = Reopened(EngineError("nobody answers"))
    backend.gate.set()
    assert "nobody answers" in ask(backend)
    backend.outcome = found = Found()
    assert ask(backend) is found and ask(backend) is found
    assert backend.num_attempts == 2


def test_a_shutdown_waits_for_no_attempt_and_its_channel_is_closed(
    threads: ThreadPoolExecutor,
) -> None:
    found = Found()
    backend = Reopened(found)
    asked = threads.submit(ask, backend)
    assert backend.begun.wait(PATIENCE_S)
    backend.shutdown()
    assert not found.is_closed
    backend.gate.set()
    assert asked.result(PATIENCE_S) is found and found.is_closed


@st.function
async def program(s: st.ProgramState) -> None:
    s += "hello" + st.gen("x")


@st.function
def plain(s: st.ProgramState) -> None:
    s += "hello" + st.gen("x")


@pytest.mark.parametrize(
    "run",
    [
        lambda **options: program.arun(**options),
        lambda **options: program.astream(**options),
        lambda **options: plain.astream(**options),
        lambda **options: program.arun_batch([{}], **options),
    ],
    ids=["arun", "astream", "plain astream", "arun_batch"],
)
@pytest.mark.parametrize("is_default", [False, True])
def test_an_event_loop_goes_on_while_a_run_waits_for_its_backend(
    run: Callable[..., Any], is_default: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop itself opens the gate."""
    backend = Reopened(Found())
    if is_default:
        monkeypatch.setattr(frontend_backend, "_default", None)
        monkeypatch.setattr(frontend_backend, "_is_own", False)
        monkeypatch.setattr(frontend_backend, "Engine", lambda: backend.channel and backend)

    async def main() -> None:
        running = asyncio.create_task(run(**({} if is_default else {"backend": backend})))
        await until(backend.begun.is_set)
        backend.gate.set()
        await running

    asyncio.run(main())
    assert backend.num_attempts == 1
