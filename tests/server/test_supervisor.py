"""The engine's supervisor with engines that are only played: who is told what, and when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from waiting import wait_until

from stemma.errors import EngineError, InvalidRequest, ProtocolError, StemmaError
from stemma.frontend.client.transport import RuntimeSilent
from stemma.server import supervisor as module
from stemma.server.supervisor import EngineState, EngineSupervisor


class PlayedProcess:
    """A process that dies when it is told to; one that is born dead never listens."""

    def __init__(self, *, is_born_dead: bool = False) -> None:
        self.endpoint = self.peer = self
        self.pid = id(self)
        self.orders: list[bytes] = []
        self.is_stopped = False
        self._has_ended = threading.Event()
        if is_born_dead:
            self.die()

    def die(self) -> None:
        self._has_ended.set()

    kill = die

    def death(self) -> str | None:
        return "it fell over" if self._has_ended.is_set() else None

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._has_ended.wait(timeout_s)

    def order(self, order: bytes) -> None:
        self.orders.append(order)

    def stop(self) -> None:
        self.is_stopped = True
        self.die()


class PlayedConnection:
    """What the supervisor needs of one; as the real one, it is refused by the dead."""

    def __init__(self, endpoint: PlayedProcess, process: PlayedProcess, **_: Any) -> None:
        if process.death() is not None:
            raise EngineError("it never listened")
        self.error: EngineError | None = None
        self._has_ended = threading.Event()

    def abandon(self, error: EngineError) -> None:
        self.error = self.error or error
        self._has_ended.set()

    def close(self) -> None:
        self.abandon(EngineError("the connection was closed"))

    def wait_ended(self) -> EngineError:
        self._has_ended.wait()
        assert self.error is not None
        return self.error


class SupervisorHarness:
    """A supervisor, and all the engines that it has started."""

    def __init__(self, deaths: int = 0) -> None:
        """`deaths`: of engines after the first one that are born dead."""
        self.engines: list[PlayedProcess] = []
        self.started_s: list[float] = []
        self._deaths = deaths
        self.supervisor = EngineSupervisor(self._launch, timeout_s=60, backoff_s=(0.0, 0.05, 0.1))

    def _launch(self) -> Any:
        is_born_dead = 0 < len(self.engines) <= self._deaths
        self.engines.append(PlayedProcess(is_born_dead=is_born_dead))
        self.started_s.append(time.monotonic())
        return self.engines[-1]

    def start(self) -> PlayedConnection:
        self.supervisor.start()
        return self.connection()

    def connection(self) -> PlayedConnection:
        found: Any = self.supervisor.wait_started()
        return found

    def wait(self, holds: Callable[[], bool]) -> None:
        wait_until(holds)

    def is_ready(self) -> bool:
        return self.supervisor.state is EngineState.READY


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Connection", PlayedConnection)


@pytest.fixture
def harness() -> Iterator[SupervisorHarness]:
    harness = SupervisorHarness()
    yield harness
    harness.supervisor.stop()
    assert all(engine.is_stopped for engine in harness.engines)


@pytest.mark.parametrize(
    "error", [RuntimeSilent("the runtime has been silent for 120 s"), ProtocolError("too slow")]
)
def test_a_lasting_connection_that_ends_is_followed_by_another(error: StemmaError) -> None:
    """It lasts over engines, but its own end is noticed while the engine lives."""
    harness = SupervisorHarness()
    harness.supervisor = EngineSupervisor(
        harness._launch, timeout_s=60, backoff_s=(0.0,), programs_outlive=True
    )
    first = harness.start()
    first.abandon(error)  # type: ignore[arg-type]
    harness.wait(lambda: harness.is_ready() and harness.supervisor.connection is not first)
    is_hung = isinstance(error, RuntimeSilent)
    assert len(harness.engines) == (2 if is_hung else 1), "who is silent hangs"
    harness.supervisor.stop()


def test_there_is_no_connection_before_there_is_an_engine(harness: SupervisorHarness) -> None:
    with pytest.raises(EngineError, match="is starting"):
        _ = harness.supervisor.connection


def test_an_engine_that_dies_tells_all_and_another_one_follows(harness: SupervisorHarness) -> None:
    first = harness.start()
    harness.engines[0].die()
    harness.wait(lambda: len(harness.engines) == 2 and harness.is_ready())
    assert "it fell over; another one is being started" in str(first.error)
    assert harness.connection() is not first and harness.supervisor.num_restarts == 1
    assert harness.engines[0].is_stopped, "its folder is left behind"


def test_an_engine_that_does_not_answer_is_killed_and_another_one_follows(
    harness: SupervisorHarness,
) -> None:
    harness.start().abandon(RuntimeSilent("it has been silent"))
    harness.wait(lambda: len(harness.engines) == 2 and harness.is_ready())
    assert harness.engines[0].death() is not None


def test_a_connection_that_was_lost_is_opened_anew_to_the_same_engine(
    harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECONNECT_AFTER_S", 0.01)
    first = harness.start()
    first.abandon(EngineError("this session is not known any more"))
    harness.wait(lambda: harness.connection() is not first)
    assert len(harness.engines) == 1 and harness.engines[0].death() is None
    harness.engines[0].die()
    harness.wait(lambda: len(harness.engines) == 2 and harness.is_ready())


def test_an_engine_that_cannot_be_reached_for_want_of_sockets_is_asked_again(
    harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.start()
    num_refused = 0

    class Refusing(PlayedConnection):
        def __init__(self, endpoint: PlayedProcess, **options: Any) -> None:
            nonlocal num_refused
            num_refused += 1
            if num_refused == 1:
                raise zmq.ZMQError(zmq.EMFILE)
            super().__init__(endpoint, **options)

    monkeypatch.setattr(module, "Connection", Refusing)
    monkeypatch.setattr(module, "RECONNECT_AFTER_S", 0.01)
    harness.engines[0].die()
    harness.wait(lambda: len(harness.engines) == 2 and harness.is_ready())
    assert num_refused == 2


def test_deaths_in_a_row_make_it_wait_longer_and_never_give_up() -> None:
    harness = SupervisorHarness(deaths=4)
    harness.start()
    harness.engines[0].die()
    harness.wait(lambda: len(harness.engines) == 3)
    with pytest.raises(EngineError, match=r"being restarted.*\d times in a row"):
        _ = harness.supervisor.connection
    harness.wait(lambda: len(harness.engines) == 6 and harness.is_ready())
    waits = [
        later - earlier for earlier, later in zip(harness.started_s[1:], harness.started_s[2:])
    ]
    assert all(wait >= least for wait, least in zip(waits, (0.05, 0.1, 0.1, 0.1)))
    harness.supervisor.stop()


def test_an_engine_that_never_was_ready_is_not_started_again() -> None:
    supervisor = EngineSupervisor(_born_dead, timeout_s=60)
    supervisor.start()
    with pytest.raises(EngineError, match="it fell over"):
        supervisor.wait_started()
    assert supervisor.state is EngineState.STOPPED
    supervisor.stop()


def _born_dead() -> Any:
    return PlayedProcess(is_born_dead=True)


@pytest.mark.parametrize("error", [OSError("no memory"), InvalidRequest("no place for a socket")])
def test_a_process_that_cannot_be_started_is_an_error_and_no_dead_thread(error: Exception) -> None:
    def launch() -> Any:
        raise error

    supervisor = EngineSupervisor(launch, timeout_s=60)
    supervisor.start()
    with pytest.raises(EngineError, match=str(error)):
        supervisor.wait_started()
    supervisor.stop()


def test_an_engine_without_a_thread_that_looks_after_it_is_followed_by_another(
    harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def start_unless_for_the_second(thread: threading.Thread) -> None:
        if len(harness.engines) == 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    harness.start()
    monkeypatch.setattr(threading.Thread, "start", start_unless_for_the_second)
    harness.engines[0].die()
    harness.wait(lambda: len(harness.engines) == 3 and harness.is_ready())


def test_an_engine_that_dies_while_draining_is_the_last_one(harness: SupervisorHarness) -> None:
    connection = harness.start()
    harness.supervisor.drain()
    assert harness.engines[0].orders == [b"drain\n"]
    assert harness.supervisor.connection is connection, "what runs goes on"
    harness.engines[0].die()
    harness.wait(lambda: harness.supervisor.state is EngineState.STOPPED)
    assert str(connection.error) == "it fell over"
    assert len(harness.engines) == 1


def test_a_drain_between_two_engines_starts_no_other() -> None:
    harness = SupervisorHarness(deaths=100)
    harness.start()
    harness.engines[0].die()
    harness.wait(lambda: len(harness.engines) > 2)
    harness.supervisor.drain()
    harness.wait(lambda: harness.supervisor.state is EngineState.STOPPED)
    with pytest.raises(EngineError, match="being stopped"):
        _ = harness.supervisor.connection
    harness.supervisor.stop()


def test_stopping_ends_a_wait_for_the_start_and_may_be_done_twice(
    harness: SupervisorHarness,
) -> None:
    harness.supervisor.stop()  # before it was started at all
    harness.supervisor.start()
    with pytest.raises(EngineError, match="being stopped"):
        harness.supervisor.wait_started()
    harness.supervisor.stop()
    assert harness.engines == []


def test_what_is_abandoned_is_told_the_reason(harness: SupervisorHarness) -> None:
    connection = harness.start()
    harness.supervisor.drain()
    harness.supervisor.abandon("time is over")
    assert str(connection.error) == "time is over"
    harness.wait(lambda: harness.supervisor.state is EngineState.STOPPED)


def test_programs_of_an_engine_that_does_not_answer_are_what_the_caller_says(
    harness: SupervisorHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object, **__: object) -> None:
        raise RuntimeSilent("it has been silent")

    connection = harness.start()
    monkeypatch.setattr(connection, "call", silent, raising=False)
    counts = [harness.supervisor.num_programs(1.0), harness.supervisor.num_programs(1.0, 1)]
    assert counts == [0, 1]
    harness.supervisor.stop()
    assert harness.supervisor.num_programs(1.0, 1) == 0, "there is none"
