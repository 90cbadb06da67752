"""The connection by itself, against a runtime played by the test over an inproc socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

import stemma as st
from stemma.errors import EngineError, ProgramError
from stemma.frontend import client as client_module
from stemma.frontend import wire
from stemma.frontend.backend import Backend
from stemma.frontend.client import Connection
from stemma.frontend.function import open_program


class Runtime:
    """The other end: welcomes, records `ops`, and answers what the test tells it to."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("inproc://played")
        self.identity = b""
        self.welcome: list[bytes] = wire.encode("welcome", model="played")

    def connect(self, **options: Any) -> Connection:
        """A connection, while this side welcomes it."""
        welcomer = threading.Thread(target=self._welcome)
        welcomer.start()
        try:
            return Connection("inproc://played", context=self.context, **options)
        finally:
            welcomer.join()

    def _welcome(self) -> None:
        assert self.hear("hello").op == "hello"
        self.send(self.welcome)

    def hear(self, op: str) -> wire.Message:
        """The next message of this kind; pings and others before it are skipped."""
        while True:
            assert self.router.poll(10_000), f"no {op} came"
            self.identity, *parts = self.router.recv_multipart()
            message = wire.decode(parts, wire.CLIENT_OPS)
            if message.op == op:
                return message

    def send(self, parts: list[bytes]) -> None:
        self.router.send_multipart([self.identity, *parts])

    def say_events(self, *events: list[Any]) -> None:
        self.send(wire.encode("events", events=list(events)))


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    runtime = Runtime()
    yield runtime
    runtime.router.close(linger=0)
    runtime.context.term()


def failing(target: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Runs `target` in a thread; the list gets what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            target()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_all_ops_up_to_the_first_wait_travel_as_one_message(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FLUSH_AFTER_S", 5.0)
    with Backend(runtime.connect()) as backend:
        state = open_program(backend, seed=3)
        forks = state.fork(4)
        forks += "text" + st.gen("x")
        state += st.gen("y")
        waiter, raised = failing(lambda: state["y"])
        message = runtime.hear("ops").header
        assert len(message["ops"]) == 1 + 4 * 2 + 1 and message["first"] == 0
        assert message["create"] == {"seed": 3, "instance": 0, "stream": False}
        runtime.say_events([message["program"], 0, 1, wire.VALUE, {"value": "Y", "text": "Y"}])
        waiter.join(5)
        assert not raised and state["y"] == "Y"
        state += "more" + st.gen("z")
        state.end()
        message = runtime.hear("ops").header
        assert len(message["ops"]) == 2 and message["first"] == 10 and message["end"] is True
        assert "create" not in message


def test_ops_that_nobody_waits_for_leave_soon_by_themselves(runtime: Runtime) -> None:
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        state += "a"
        start = time.monotonic()
        assert len(runtime.hear("ops").header["ops"]) == 1
        assert time.monotonic() - start < 2.0


def test_large_ops_leave_in_messages_of_bounded_size(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FLUSH_AFTER_BYTES", 1000)
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        for _ in range(10):
            state += "x" * 400
        state.end()
        sizes, is_last = [], False
        while not is_last:
            header = runtime.hear("ops").header
            assert header["first"] == sum(sizes)
            sizes.append(len(header["ops"]))
            is_last = header.get("end", False)
        assert sum(sizes) == 10 and max(sizes) <= 2


def test_a_connection_that_is_closed_ends_every_wait(runtime: Runtime) -> None:
    connection = runtime.connect()
    state = open_program(Backend(connection))
    state += st.gen("x")
    waits = [failing(lambda: state["x"]), failing(lambda: connection.call("info"))]
    runtime.hear("call")
    connection.close()
    for thread, raised in waits:
        thread.join(5)
        assert not thread.is_alive() and isinstance(raised[0], EngineError)
        assert "closed" in str(raised[0])
    with pytest.raises(EngineError):
        open_program(Backend(connection))
    connection.close()


def test_an_error_reply_ends_the_connection_with_the_runtimes_words(runtime: Runtime) -> None:
    connection = runtime.connect()
    state = open_program(Backend(connection))
    state += st.gen("x")
    thread, raised = failing(lambda: state["x"])
    runtime.hear("ops")
    runtime.send(wire.encode("error", message="you are not known here"))
    thread.join(5)
    assert isinstance(raised[0], EngineError) and "you are not known here" in str(raised[0])
    connection.close()


def test_garbage_from_the_runtime_ends_the_connection_and_no_wait_hangs(runtime: Runtime) -> None:
    connection = runtime.connect()
    thread, raised = failing(lambda: connection.call("info"))
    runtime.hear("call")
    runtime.send([b"\xff\x00"])
    thread.join(5)
    assert isinstance(raised[0], EngineError) and "not JSON" in str(raised[0])
    connection.close()


def test_another_protocol_version_is_an_error_with_both_versions(runtime: Runtime) -> None:
    runtime.welcome = [b'{"v": 2, "op": "welcome"}']
    with pytest.raises(EngineError, match="protocol version 2; this side speaks 1"):
        runtime.connect()


def test_a_dead_process_is_noticed_without_waiting_for_its_silence(runtime: Runtime) -> None:
    death: list[str] = []
    connection = runtime.connect(is_alive=lambda: death[0] if death else None)
    state = open_program(Backend(connection))
    state += st.gen("x")
    thread, raised = failing(lambda: state["x"])
    death.append("it was killed")
    thread.join(5)
    assert isinstance(raised[0], EngineError) and str(raised[0]) == "it was killed"


def test_a_silent_runtime_is_given_up(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "RUNTIME_TIMEOUT_S", 0.3)
    monkeypatch.setattr(client_module, "HEARTBEAT_POLL_S", 0.05)
    connection = runtime.connect()
    with pytest.raises(EngineError, match="silent"):
        connection.call("info", timeout_s=5.0)
    connection.close()


def test_an_idle_client_pings(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(client_module, "HEARTBEAT_POLL_S", 0.02)
    with Backend(runtime.connect()):
        runtime.hear("ping")
        runtime.hear("ping")


def test_a_call_without_a_reply_is_given_up(runtime: Runtime) -> None:
    with Backend(runtime.connect()) as backend:
        with pytest.raises(EngineError, match=r"info: no reply within 0\.1 s"):
            backend.connection.call("info", timeout_s=0.1)


def test_a_program_that_is_left_early_is_cancelled(runtime: Runtime) -> None:
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        state += st.gen("x")
        state.cancel()
        program = runtime.hear("cancel").header["program"]
        runtime.say_events([program, 0, 0, wire.VALUE, {"value": "late"}])
        with pytest.raises(EngineError, match="cancelled"):
            state["x"]
        assert state.error() is not None


def test_events_of_a_failure_reach_the_wait_of_their_branch_only(runtime: Runtime) -> None:
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        left, right = state.fork(2)
        for branch in (left, right):
            branch += st.gen("x")
        state.end()
        program = runtime.hear("ops").header["program"]
        failure = {"message": "no", "kind": "InvalidRequest", "op": "x", "source": "f.py:1"}
        runtime.say_events(
            [program, 1, 0, wire.FAILED, failure],
            [program, 2, 0, wire.VALUE, {"value": "v", "text": "v"}],
            [program, 0, 0, wire.DONE, None],
        )
        assert right["x"] == "v" and right.error() is None
        for _ in range(2):
            with pytest.raises(ProgramError, match=r"x: no \(at f\.py:1\)") as caught:
                left["x"]
        assert caught.value.kind == "InvalidRequest"
