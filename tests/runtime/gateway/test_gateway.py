"""The gateway over a real socket: malformed clients are refused, and no other client suffers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed_clients import RawClient, Served
from waiting import PATIENCE_S, ready, wait_until

import stemma
from stemma.errors import ProtocolError
from stemma.frontend.protocol import wire
from stemma.runtime.config import EngineConfig
from stemma.runtime.gateway import control
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.programs import call_factory

GRACE_S = 1.5


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    served = Served(checkpoint, tmp_path_factory.mktemp("gateway"))
    yield served
    served.stop()
    torch.set_num_threads(num_threads)


@pytest.fixture
def raw_client(served: Served) -> Iterator[RawClient]:
    raw_client = RawClient(served)
    yield raw_client
    raw_client.socket.close()


@pytest.fixture(scope="module")
def healthy(served: Served) -> Iterator[stemma.Runtime]:
    with stemma.Runtime(served.endpoint) as backend:
        yield backend


@stemma.function
def program(s: stemma.ProgramState, max_tokens: int = 4) -> None:
    s += "hello" + stemma.gen("x", max_tokens=max_tokens, temperature=0, ignore_eos=True)


def test_hello_is_welcomed_with_what_the_engine_is(raw_client: RawClient) -> None:
    first, second = raw_client.hello(), raw_client.hello()
    assert first.op == "welcome" and first.header["vocab_size"] == 260
    assert first.header["max_frame_bytes"] == wire.MAX_FRAME_BYTES
    assert first.header["session"] == second.header["session"], "hello twice is one client"


HELLO = orjson.dumps({"v": 2, "op": "hello"})


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b""], "not JSON"),
        ([b"\x00\xff garbage"], "not JSON"),
        ([b"[1, 2]"], "not an object"),
        ([b'{"v": 99, "op": "hello"}'], "protocol version 99; this side speaks 2"),
        ([b'{"v": 2, "op": "sing"}'], "unknown op 'sing'"),
        ([HELLO] * 20, "20 parts"),
        ([b'{"v": 2, "op": "ops", "program": 1}'], "ops before hello"),
        ([b'{"v": 2, "op": "ping"}'], "ping before hello"),
        ([b'{"v": 2, "op": "call", "method": "info"}'], "call before hello"),
    ],
)
def test_a_malformed_message_gets_an_error_reply_and_disturbs_nobody(
    raw_client: RawClient, healthy: stemma.Runtime, frames: list[bytes], message: str
) -> None:
    state = program.stream(max_tokens=50, backend=healthy)
    raw_client.send(*frames)
    reply = raw_client.hear()
    assert reply.op == "error" and message in reply.header["message"]
    assert reply.header["supported"] == [wire.VERSION]
    assert "".join(state.text_iter()) == program.run(max_tokens=50, backend=healthy).text()
    assert raw_client.hello().op == "welcome", "the client may still behave"


@pytest.mark.parametrize("number", [-1, "1", None, True, 2**63, 1.5, []])
def test_a_program_number_that_is_none_is_an_error(raw_client: RawClient, number: object) -> None:
    raw_client.hello()
    raw_client.say_ops(number, [], create={})
    assert "program=" in raw_client.hear().header["message"]
    raw_client.say("cancel", program=number)
    assert "program=" in raw_client.hear().header["message"]


@pytest.mark.parametrize(
    "ops",
    [
        "text", 7, [["text"]], [[["text"], 0, 0, None]], [[{}, 0, 0, None]], [None],
        [["text", 0, 5, None, "a"]], [["gen", 0, 0, None, "x", {"top_p": None}]],
        [["text", 0, 0, None, "a"], ["text", 0, 0, None, "a"]],
    ],
    ids=str,
)  # fmt: skip
def test_ops_that_cannot_be_read_end_their_program_alone(
    raw_client: RawClient, ops: object
) -> None:
    raw_client.hello()
    fine = [["text", 0, 0, None, "a"], ["gen", 0, 1, None, "x", {"max_tokens": 2}]]
    raw_client.say_ops(1, ops, create={})
    raw_client.say_ops(1, [["text", 0, 1, None, "late"]], end=True)
    raw_client.say_ops(2, fine, create={}, end=True)
    events = raw_client.events()
    if len(events) == 2:
        events += raw_client.events()
    assert [(e[0], e[3]) for e in events] == [
        (1, wire.FAILED), (1, wire.DONE), (2, wire.VALUE), (2, wire.DONE)
    ]  # fmt: skip
    assert events[0][4]["kind"] == "InvalidProgram"


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("destroy", {}, "method='destroy' is not allowed; allowed: one of"),
        (["info"], {}, "unhashable"),
        (None, None, "method=None"),
        ("tokenize", {}, "text"),
        ("tokenize", {"text": "a", "more": 1}, "more"),
        ("detokenize", {"ids": 5}, "iterable"),
        ("detokenize", {"ids": [-1]}, ""),
        ("detokenize", {"ids": [10**18]}, ""),
        ("detokenize", {"ids": ["x"]}, ""),
        ("tree", {"max_token_ids": "many"}, ""),
    ],
)
def test_a_call_that_fails_is_answered(
    raw_client: RawClient, method: object, args: object, message: str
) -> None:
    raw_client.hello()
    raw_client.say("call", id=5, method=method, args=args)
    reply = raw_client.hear()
    assert reply.op == "reply" and reply.header["id"] == 5 and not reply.header["ok"]
    assert message in reply.header["error"]


def test_calls_answer(raw_client: RawClient) -> None:
    raw_client.hello()
    answers = []
    for method, args in [
        ("tokenize", {"text": "ab<eos>"}), ("detokenize", {"ids": [97, 98]}),
        ("info", {}), ("tree", {}), ("flush_cache", {}),
    ]:  # fmt: skip
        raw_client.say("call", id=1, method=method, args=args)
        answers.append(raw_client.hear().header["result"])
    assert answers[:2] == [list(b"ab<eos>"), "ab"]
    assert answers[2]["total_tokens"] == 8192 and "nodes" in answers[3]
    assert isinstance(answers[4], int)


def test_calls_that_wait_are_bounded_by_tenant(
    served: Served, raw_client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    tokenizer = served.loaded.tokenizer
    monkeypatch.setattr(control, "MAX_WAITING_BYTES", 70_000)
    monkeypatch.setattr(tokenizer, "encode", lambda text: gate.wait(PATIENCE_S) and [len(text)])
    other = RawClient(served)
    try:
        for client in (raw_client, other):
            client.hello()
        for call_id in (1, 2):  # the second would be more than half
            raw_client.say("call", id=call_id, method="tokenize", args={"text": "a" * 30_000})
        refused = raw_client.hear().header
        assert refused["id"] == 2 and not refused["ok"] and refused["kind"] == "EngineError"
        assert "try again later" in refused["error"]
        other.say("call", id=1, method="tokenize", args={"text": "a" * 17_000})
        gate.set()
        assert raw_client.hear().header["result"] == [30_000]
        assert other.hear().header["result"] == [17_000], "another's has room"
        raw_client.say("call", id=3, method="tokenize", args={"text": "a" * 30_000})
        assert raw_client.hear().header["result"] == [30_000], "it was given back"
    finally:
        gate.set()
        other.socket.close()


FRAMES = st.lists(
    st.binary(max_size=30)
    | st.fixed_dictionaries(
        {"v": st.just(2), "op": st.sampled_from(sorted(wire.CLIENT_OPS))},
        optional={
            "program": st.integers(-1, 3), "ops": st.lists(st.lists(st.integers() | st.none())),
            "create": st.none() | st.just({}), "method": st.text(), "args": st.lists(st.none()),
            "end": st.booleans(),
        },
    ).map(lambda header: orjson.dumps(header, option=orjson.OPT_NON_STR_KEYS, default=str)
          if all(abs(i or 0) < 2**63 for o in header.get("ops", []) for i in o) else b"{"),
    min_size=1, max_size=3,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(FRAMES, max_size=4))
def test_the_gateway_outlives_any_frames(served: Served, messages: list[list[bytes]]) -> None:
    raw_client = RawClient(served)
    raw_client.hello()
    for frames in messages:
        raw_client.send(*frames)
    raw_client.say("hello")  # it may have said bye
    raw_client.say("call", id="last", method="tokenize", args={"text": "a"})
    while (reply := raw_client.hear()).header.get("id") != "last":
        pass
    assert reply.header["result"] == [97]
    raw_client.socket.close()


def test_the_gateways_clock_is_told_of_the_engines_steps(
    served: Served, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = served.gateway._host.clock
    read_after_step, readings = clock.read_after_step, []
    monkeypatch.setattr(clock, "read_after_step", lambda: readings.append(read_after_step()))
    program.run(max_tokens=4, backend=healthy)
    assert readings


def test_a_client_without_a_connection_loses_its_programs_and_a_silent_one_does_not(
    served: Served,
    raw_client: RawClient,
    healthy: stemma.Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = RawClient(served)
    session = lost.hello().header["session"]
    raw_client.hello()
    ops = [
        ["text", 0, 0, None, "silence"],
        ["gen", 0, 1, None, "x", {"max_tokens": 3900, "ignore_eos": True}],
    ]
    start = time.monotonic()
    for client in (raw_client, lost):
        client.say_ops(1, ops, create={"seed": 1})
    wait_for(healthy, lambda info: info["num_running"] == 2)
    monkeypatch.setattr(served.gateway._host, "_grace_s", GRACE_S)
    lost.socket.close()
    wait_for(healthy, lambda info: info["num_running"] == 1)
    assert time.monotonic() - start > GRACE_S, "it was given its time"
    raw_client.say("ping")
    while raw_client.hear().op != "pong":  # its programs run, however long it was silent
        pass
    raw_client.say("cancel", program=1)
    wait_for(healthy, lambda info: info["num_running"] == 0 and info["num_programs"] == 0)
    info = healthy.get_server_info()
    assert info["free_tokens"] + info["evictable_tokens"] == info["total_tokens"]
    other = RawClient(served)
    other.say("hello", session=session)
    assert "without a connection for longer than the grace" in other.hear().header["message"]
    other.socket.close()


def test_a_cancelled_program_stops_at_once_and_says_no_more(
    raw_client: RawClient, healthy: stemma.Runtime
) -> None:
    raw_client.hello()
    ops = [["text", 0, 0, None, "c"], ["gen", 0, 1, None, "x", {"max_tokens": 3900}]]
    raw_client.say_ops(1, ops, create={})
    raw_client.say("cancel", program=1)
    raw_client.say("cancel", program=1)
    raw_client.say("ping")
    while raw_client.hear().op != "pong":  # a step may have come between the messages
        pass
    wait_for(healthy, lambda info: info["num_running"] == 0)


def wait_for(backend: stemma.Runtime, condition: Any) -> None:
    wait_until(lambda: bool(condition(backend.get_server_info())))


def test_a_message_that_found_its_queue_full_is_sent_later(
    raw_client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, num_refused = zmq.Socket.send_multipart, 0

    def is_full(socket: Any, parts: list[bytes], *args: Any, **options: Any) -> Any:
        nonlocal num_refused
        if any(b'"op":"events"' in part for part in parts) and num_refused < 3:
            num_refused += 1
            raise zmq.Again
        return send(socket, parts, *args, **options)

    monkeypatch.setattr(zmq.Socket, "send_multipart", is_full)
    raw_client.hello()
    ops = [["text", 0, 0, None, "c"], ["gen", 0, 1, None, "x", {"max_tokens": 1}]]
    raw_client.say_ops(77, ops, create={}, end=True)
    assert [event[3] for event in raw_client.events()] == [wire.VALUE, wire.DONE]
    assert num_refused == 3


def test_results_larger_than_a_message_are_sent_in_several(
    raw_client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_client.hello()
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 4000)
    ops: list[list[object]] = [["text", 0, 0, None, "q"]]
    for seq in range(1, 9):
        params = {"max_tokens": 20, "logprobs": 0 if seq < 8 else 8, "ignore_eos": True}
        ops.append(["gen", 0, seq, None, f"x{seq}", params])
    raw_client.say_ops(1, ops[:5], create={})
    raw_client.say_ops(1, ops[5:], end=True)
    events = raw_client.events()
    assert [event[3] for event in events] == [wire.VALUE] * 7 + [wire.FAILED, wire.DONE]
    assert "at most 4000" in events[-2][4]["message"], "an event too large fails its op"


def test_a_fault_in_one_program_ends_that_program_only(
    raw_client: RawClient, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(self: object, *arguments: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(call_factory.CallFactory, "select", explode)
    raw_client.hello()
    ops = [["text", 0, 0, None, "q"], ["select", 0, 1, None, "x", ["a", "b"]]]
    raw_client.say_ops(1, ops, create={}, end=True)
    failed, done = raw_client.events()
    assert failed[3] == wire.FAILED and done[3] == wire.DONE
    assert failed[4]["kind"] == "EngineError" and "a fault of ours" in failed[4]["message"]
    assert program.run(backend=healthy)["x"]


@pytest.mark.parametrize(
    "create",
    [{"tools": '["\\ud800"]'}, {"tools": "{}"}, {"template_kwargs": "{"}, {"template_kwargs": 7}],
)
def test_tools_that_cannot_be_read_end_their_program_and_not_their_client(
    raw_client: RawClient, create: dict[str, Any]
) -> None:
    raw_client.hello()
    ops = [["text", 0, 0, None, "q"], ["gen", 0, 1, None, "x", {"max_tokens": 1}]]
    raw_client.say_ops(1, ops, create=create, end=True)
    failed, done = raw_client.events()
    assert failed[3] == wire.FAILED and done[3] == wire.DONE
    assert failed[4]["kind"] == "InvalidProgram" and next(iter(create)) in failed[4]["message"]
    raw_client.say_ops(2, ops, create={}, end=True)
    assert [event[3] for event in raw_client.events()] == [wire.VALUE, wire.DONE]


def test_an_address_that_cannot_be_bound_is_an_error(served: Served, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/no/such/folder/x.ipc"
    with pytest.raises(ProtocolError, match="cannot listen at"):
        Gateway(served.loaded, [endpoint], context=served.context)


def test_what_wakes_the_loop_is_taken_so_that_it_sleeps_again(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Else an idle engine would spin after the first block from disk, or a compiled grammar."""
    config = EngineConfig(checkpoint, dtype="float32", max_total_tokens=512, kv_store=tmp_path)
    loaded = LoadedModel(config)
    gateway = Gateway(loaded, ["inproc://woken"], context=zmq.Context())
    thread = threading.Thread(target=gateway.run, daemon=True)
    sources = [loaded.engine.kv_store, loaded.engine.grammars]
    for source in sources:
        assert source is not None
        os.write(source._wake_w, b"\0")
    thread.start()
    wait_until(lambda: not ready(sources, 0.0))
    gateway.stop()
    thread.join(PATIENCE_S)
