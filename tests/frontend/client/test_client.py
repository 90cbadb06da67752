"""The connection by itself, against a runtime played by the test over an inproc socket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from waiting import wait_until

import stemma as st
from stemma.errors import EngineError, ModelNotFound, ProgramError
from stemma.frontend.client import client as client_module
from stemma.frontend.client import outbox as outbox_module
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.frontend.client.transport import Transport
from stemma.frontend.dsl.function import open_program
from stemma.frontend.protocol import interning, ir, wire
from stemma.frontend.protocol.link import Link


class Runtime:
    """The other end: welcomes, records `ops`, and answers what the test tells it to."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind("inproc://played")
        self.identity = b""
        self.welcome: list[bytes] = wire.encode("welcome", model="played", session="s", ack=0)
        self.link = Link()

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
            assert self.router.poll(120_000), f"no {op} came"
            self.identity, *parts = self.router.recv_multipart()
            message = wire.decode(parts, wire.CLIENT_OPS)
            if self.link.take(message) and message.op == op:
                return message

    def hear_ops(self) -> dict[str, Any]:
        """The next `ops` message, which has one program's."""
        (program,) = self.hear("ops").header["programs"]
        return dict(program)

    def send(self, parts: list[bytes]) -> None:
        self.router.send_multipart([self.identity, *parts])

    def say_events(self, *events: list[Any]) -> None:
        self.link.put("events", events=list(events))
        self.send_link()

    def send_link(self) -> None:
        while (parts := self.link.unsent()) is not None:
            self.send(parts)
            self.link.sent()


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
        message = runtime.hear_ops()
        assert len(message["ops"]) == 1 + 4 * 2 + 1
        assert message["create"] == {"seed": 3, "instance": 0, "stream": False}
        runtime.say_events([message["program"], 0, 1, wire.VALUE, {"value": "Y", "text": "Y"}])
        waiter.join(5)
        assert not raised and state["y"] == "Y"
        state += "more" + st.gen("z")
        state.end()
        message = runtime.hear_ops()
        assert len(message["ops"]) == 2 and message["end"] is True
        assert "create" not in message


class _Deaf:
    """Has no use for a program's events."""

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None: ...

    def handle_disconnect(self, error: EngineError) -> None: ...


def test_a_whole_program_is_one_message_and_wakes_the_connection_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT_POLL_S", 60.0)
    connection = runtime.connect()
    wakes: list[None] = []
    wake = connection._wake

    def counted() -> None:
        wakes.append(None)
        wake()

    monkeypatch.setattr(connection, "_wake", counted)
    wait_until(lambda: connection._sleep == client_module._ASLEEP)
    program = connection.open_program(_Deaf(), {"seed": 0, "instance": 0, "stream": False})
    connection.send_program(program, [ir.Text(0, 0, None, "a"), ir.Text(0, 1, None, "b")])
    message = runtime.hear_ops()
    assert (len(message["ops"]), message["end"], len(wakes)) == (2, True, 1)
    connection.close()


def test_ops_that_nobody_waits_for_leave_soon_by_themselves(runtime: Runtime) -> None:
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        state += "a"
        assert len(runtime.hear_ops()["ops"]) == 1


def test_large_ops_leave_in_messages_of_bounded_size(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MESSAGE_BYTES", 1000)
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        for index in range(10):
            state += str(index) * 400
        state.end()
        sizes, is_last = [], False
        while not is_last:
            header = runtime.hear_ops()
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
    runtime.welcome = [b'{"v": 3, "op": "welcome"}']
    with pytest.raises(EngineError, match="protocol version 3; this side speaks 2"):
        runtime.connect()


def test_a_connection_that_ends_leaves_no_socket_open(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    transport = Transport(context, f"ipc://{tmp_path}/nobody.ipc", None, 0, None, None, 60.0)
    dealer, monitor = transport._dealer, transport._monitor
    assert monitor is not None
    transport.close()
    assert dealer.closed and monitor.closed
    context.term()


def test_a_dead_process_is_noticed_without_waiting_for_its_silence(runtime: Runtime) -> None:
    process = PlayedProcess()
    connection = runtime.connect(process=process)
    state = open_program(Backend(connection))
    state += st.gen("x")
    thread, raised = failing(lambda: state["x"])
    process.cause = "it was killed"
    thread.join(60)
    assert isinstance(raised[0], EngineError) and str(raised[0]) == "it was killed"


@dataclass
class PlayedProcess:
    """A runtime's process, of which the test says what the system would."""

    cause: str | None = None
    is_held: bool = False
    num_looks: int = 0

    def death(self) -> str | None:
        return self.cause

    def is_stopped(self) -> bool:
        self.num_looks += 1
        return self.is_held


def test_a_silent_runtime_is_given_up(runtime: Runtime) -> None:
    connection = runtime.connect(silence_s=0.3)
    with pytest.raises(EngineError, match="silent"):
        connection.call("info", timeout_s=240.0)
    connection.close()


def test_a_runtime_whose_process_is_stopped_is_not_given_up(runtime: Runtime) -> None:
    process = PlayedProcess(is_held=True)
    connection = runtime.connect(process=process, silence_s=0.1)
    wait_until(lambda: process.num_looks >= 4)  # each after half of that silence
    assert connection.error is None
    process.is_held = False
    assert "silent" in str(connection.wait_ended())


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


def test_calls_that_are_awaited_hold_no_thread(runtime: Runtime) -> None:
    """And end in the answer, the refusal, the limit, or with the caller, who is heard no more."""
    connection = runtime.connect()
    asked: list[int] = []

    def answer() -> None:
        while len(asked) < 43:
            asked.append(runtime.hear("call").header["id"])
        for call_id in asked[:40]:
            runtime.link.put("reply", id=call_id, ok=True, result=call_id)
        runtime.link.put("reply", id=asked[40], ok=False, error="no", kind="ModelNotFound")
        runtime.link.put("reply", id=asked[41], ok=True, result="nobody asks any more")
        runtime.send_link()

    async def ask() -> list[Any]:
        num_threads = threading.active_count()
        calls = [asyncio.ensure_future(connection.acall("info", None)) for _ in range(42)]
        late = asyncio.ensure_future(connection.acall("info", 0.2))
        await asyncio.sleep(0)
        assert threading.active_count() == num_threads
        calls[41].cancel()
        return await asyncio.gather(*calls, late, return_exceptions=True)

    runtime_thread = threading.Thread(target=answer)
    runtime_thread.start()
    *answers, refused, cancelled, late = asyncio.run(ask())
    runtime_thread.join()
    assert answers == asked[:40]
    assert isinstance(refused, ModelNotFound) and isinstance(cancelled, asyncio.CancelledError)
    assert str(late) == "info: no reply within 0.2 s"
    assert connection.error is None and not connection._calls
    connection.close()


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
        program = runtime.hear_ops()["program"]
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


def test_an_author_without_credit_waits_until_the_runtime_has_taken_what_was_sent(
    runtime: Runtime,
) -> None:
    runtime.welcome = wire.encode("welcome", session="s", ack=0, credit_bytes=10_000)
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)

        def write() -> None:
            nonlocal state
            for index in range(100):
                state += f"{index:1000}"

        writer, raised = failing(write)
        ops: list[Any] = []
        while len(ops) < 10:
            ops += runtime.hear_ops()["ops"]
        writer.join(0.2)
        assert writer.is_alive() and len(ops) <= 12, "it goes on only with credit"
        assert backend.connection._outbox.held_bytes < 12_000
        while writer.is_alive():
            runtime.send(wire.encode("credit", ack=runtime.link.take_ack()))
            while runtime.router.poll(20):
                ops += runtime.hear_ops()["ops"]
        assert not raised
        state.end()
        while len(ops) < 100:
            ops += runtime.hear_ops()["ops"]
        assert [int(op[4]) for op in ops] == list(range(100))


def test_an_author_without_credit_is_freed_when_the_connection_ends(runtime: Runtime) -> None:
    runtime.welcome = wire.encode("welcome", session="s", ack=0, credit_bytes=1000)
    connection = runtime.connect()
    state = open_program(Backend(connection))
    state += "x" * 2000
    writer, raised = failing(lambda: state.__iadd__("y"))
    runtime.hear("ops")
    connection.close()
    writer.join(5)
    assert not writer.is_alive() and isinstance(raised[0], EngineError)


def test_a_text_that_repeats_is_sent_once(runtime: Runtime) -> None:
    prefix = "It was a dark night. " * 50
    with Backend(runtime.connect()) as backend:
        for _ in range(3):
            state = open_program(backend)
            state += prefix
            state.end()
        first = runtime.hear_ops()
        assert first["ops"][0][4] == prefix
        interned = runtime.hear("intern").header
        ((slot, text),) = interned["texts"]
        assert text == prefix
        slots: list[Any] = []
        while len(slots) < 2:
            for program in runtime.hear("ops").header["programs"]:
                slots += [op[4] for op in program["ops"]]
        assert slots == [slot, slot]


def test_a_schema_that_repeats_is_sent_once_and_its_gens_are_encoded_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[Any] = []
    encode = wire.encode_part
    monkeypatch.setattr(client_module, "FLUSH_AFTER_S", 5.0)
    monkeypatch.setattr(
        wire, "encode_part", lambda kind, part: encoded.append(part) or encode(kind, part)
    )
    schema = {"type": "object", "properties": {f"name_{i}": {"type": "string"} for i in range(20)}}
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        for _ in range(4):
            state += st.gen(json_schema=schema)
        state.end()
        ((slot, source),) = runtime.hear("intern").header["texts"]
        ops = runtime.hear_ops()["ops"]
    sources = [op[5]["constraint"]["source"] for op in ops]
    assert sources == [source, slot, slot, slot] and json.loads(source) == schema
    assert len(encoded) == 5, "each gen, and the schema when it gets its slot"


def test_a_long_prediction_that_repeats_is_sent_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "FLUSH_AFTER_S", 5.0)
    expected = "as it was " * interning.MIN_CHARS
    with Backend(runtime.connect()) as backend:
        state = open_program(backend)
        for _ in range(3):
            state += st.gen(prediction=expected, regex="a")
        state.end()
        ((slot, text),) = runtime.hear("intern").header["texts"]
        ops = runtime.hear_ops()["ops"]
    assert text == expected and [op[5]["prediction"] for op in ops] == [expected, slot, slot]
    assert {op[5]["constraint"]["source"] for op in ops} == {"a"}


def test_ended_programs_share_messages(runtime: Runtime) -> None:
    with Backend(runtime.connect()) as backend:
        for index in range(200):
            state = open_program(backend)
            state += f"text {index}"
            state.end()
        programs, num_messages = 0, 0
        while programs < 200:
            programs += len(runtime.hear("ops").header["programs"])
            num_messages += 1
        assert num_messages < 100


def test_the_order_of_ops_and_interned_texts_holds_when_slots_are_filled_anew(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a program that was not flushed yet names by a slot must travel before the slot's next
    text."""
    monkeypatch.setattr(interning, "MAX_TOTAL_CHARS", 600)
    monkeypatch.setattr(client_module, "FLUSH_AFTER_S", 5.0)
    texts = ["a" * 500, "b" * 500]
    with Backend(runtime.connect()) as backend:
        states = [open_program(backend) for _ in range(4)]
        for state, text in zip(states, [texts[0], texts[0], texts[1], texts[1]]):
            state += text
        for state in states:
            state.end()
        taken, read = interning.TakenTexts(), dict[int, str]()
        while len(read) < 4:
            runtime.router.poll(120_000)
            _, *parts = runtime.router.recv_multipart()
            message = wire.decode(parts, wire.CLIENT_OPS)
            if message.op == "intern":
                taken.change(message.header)
            for program in message.header.get("programs", []):
                for op in program["ops"]:
                    taken.restore(op)
                    read[program["program"]] = op[4]
        assert [read[program] for program in sorted(read)] == [t for t in texts for _ in range(2)]
