"""Sessions over connections that break, clients that are slow or dead, and the limits of each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from malformed_clients import RawClient, Served
from waiting import PATIENCE_S, wait_until

import stemma
from stemma.bench.harness.tcp_proxy import TcpProxy
from stemma.bench.serving.runners.ports import free_port
from stemma.errors import BatchError, EngineError
from stemma.frontend.client.transport import Transport
from stemma.frontend.protocol import wire
from stemma.runtime.gateway import gateway as gateway_module
from stemma.runtime.schedule.request import Request
from stemma.runtime.sessions import clients as clients_module
from stemma.runtime.sessions import host as host_module


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "HEARTBEAT_S", 0.3)  # so that a short grace period is long enough
        served = Served(checkpoint, tmp_path_factory.mktemp("sessions"), port=free_port())
        yield served
        served.stop()
    torch.set_num_threads(num_threads)


@pytest.fixture
def proxy(served: Served) -> Iterator[TcpProxy]:
    with TcpProxy(int(served.tcp_endpoint.rpartition(":")[2])) as proxy:
        yield proxy


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
def program(s: stemma.ProgramState, tag: str = "", max_tokens: int = 4) -> None:
    s += f"hello {tag}"
    s += stemma.gen("x", max_tokens=max_tokens, temperature=0, ignore_eos=True)
    s += " and " + stemma.gen("y", max_tokens=4, temperature=0, ignore_eos=True)


GEN: list[list[object]] = [
    ["text", 0, 0, None, "c"],
    ["gen", 0, 1, None, "x", {"max_tokens": 3900, "ignore_eos": True, "temperature": 0}],
]


def wait_for(backend: stemma.Runtime, condition: Any) -> None:
    wait_until(lambda: bool(condition(backend.get_server_info())))


# --- connections that break -----------------------------------------------------------------------


def test_a_stream_goes_on_over_connections_that_are_cut_again_and_again(
    proxy: TcpProxy, healthy: stemma.Runtime
) -> None:
    """Nothing is lost and nothing doubled: the text is that of an undisturbed run."""
    expected = program.run(tag="cut", max_tokens=300, backend=healthy).text()
    with stemma.Runtime(f"tcp://127.0.0.1:{proxy.port}") as backend:
        state = program.stream(tag="cut", max_tokens=300, backend=backend)
        text = ""
        num_cuts = 0
        for piece in state.text_iter():
            text += piece
            if len(text) > 100 * (num_cuts + 1) and num_cuts < 2:
                proxy.cut()
                num_cuts += 1
        assert num_cuts == 2 and text == expected


def test_a_client_that_learns_late_of_a_new_connection_says_hello_again(
    proxy: TcpProxy, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ connects again by itself: a client that was slow to see the loss has then sent to a
    runtime that does not know it."""
    expected = program.run(tag="late", max_tokens=300, backend=healthy).text()
    poll, wanted, held = Transport.poll, threading.Event(), threading.Event()

    def poll_late(transport: Transport, timeout_s: float) -> list[wire.Message]:
        if wanted.is_set() and not held.is_set() and transport._endpoint.startswith("tcp"):
            held.set()
            wait_until(lambda: proxy.num_accepted == 2)
            transport._last_sent_s = 0.0  # it is time for a ping
            transport.send()
            assert transport._dealer.poll(1000 * int(PATIENCE_S)), "it is answered"
        return poll(transport, timeout_s)

    monkeypatch.setattr(Transport, "poll", poll_late)
    with stemma.Runtime(f"tcp://127.0.0.1:{proxy.port}") as backend:
        state = program.stream(tag="late", max_tokens=300, backend=backend)
        pieces = state.text_iter()
        text = next(pieces)
        wanted.set()
        assert held.wait(PATIENCE_S)
        proxy.cut()
        assert text + "".join(pieces) == expected


def test_a_batch_survives_cuts_while_it_is_sent(proxy: TcpProxy, healthy: stemma.Runtime) -> None:
    batch = [{"tag": f"{i % 7}" * 300} for i in range(120)]
    expected = {b["tag"]: program.run(**b, backend=healthy).text() for b in batch[:7]}
    with stemma.Runtime(f"tcp://127.0.0.1:{proxy.port}") as backend:
        cutter = threading.Thread(
            target=lambda: [proxy.cut() or time.sleep(0.15) for _ in range(6)]
        )
        cutter.start()
        states = program.run_batch(batch, backend=backend)
        cutter.join()
    assert [state.text() for state in states] == [expected[b["tag"]] for b in batch]


def test_a_client_that_is_away_for_longer_than_the_grace_period_loses_its_programs(
    served: Served, proxy: TcpProxy, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.gateway._host, "_grace_s", 1.0)
    with stemma.Runtime(f"tcp://127.0.0.1:{proxy.port}") as backend:
        state = program.stream(max_tokens=3000, backend=backend)
        wait_for(healthy, lambda info: info["num_running"] == 1)
        proxy.cut(come_back=False)
        wait_for(healthy, lambda info: info["num_running"] == 0)
        with pytest.raises(EngineError, match="broke and was not back in 1 s"):
            "".join(state.text_iter())


def test_a_session_that_has_ended_is_an_error_for_who_comes_back(
    served: Served, raw_client: RawClient
) -> None:
    raw_client.say("hello", session="f" * 32)
    assert "this session is not known any more" in raw_client.hear().header["message"]
    raw_client.say("hello", session=["x"])
    assert "not known any more" in raw_client.hear().header["message"]
    assert raw_client.hello().op == "welcome"


def test_another_connection_takes_the_session_over_with_its_token(
    served: Served, raw_client: RawClient
) -> None:
    token = raw_client.hello().header["session"]
    raw_client.say_ops(1, [["text", 0, 0, None, "a"], ["gen", 0, 1, None, "x", {"max_tokens": 2}]],
                     create={}, end=True)  # fmt: skip
    assert raw_client.hear().header["events"], "and it does not acknowledge them"
    other = RawClient(served)
    other.link.put("cancel", program=9)  # as if it had sent the first one's message
    other.send(*wire.encode("hello", session=token, ack=0))
    welcome = other.hear()
    assert welcome.header["session"] == token and welcome.header["ack"] == 1
    assert [event[3] for event in other.events()][-1] == wire.DONE, "sent again"
    raw_client.say("ping")
    assert "ping before hello" in raw_client.hear().header["message"]
    other.socket.close()


def test_a_message_that_comes_twice_is_carried_out_once_and_a_gap_is_an_error(
    raw_client: RawClient,
) -> None:
    raw_client.hello()
    call: dict[str, Any] = {"method": "tokenize", "args": {"text": "a"}}
    raw_client.link.put("call", id=1, **call)
    for _ in range(3):
        raw_client.send(*raw_client.link.unsent() or [])
    raw_client.link.sent()
    raw_client.send(*wire.encode("call", n=3, ack=0, id=3, **call))
    replies = [raw_client.hear(), raw_client.hear()]
    assert [reply.header.get("id") for reply in replies if reply.op == "reply"] == [1]
    assert "message 3 came after 1" in str(replies)
    raw_client.say("call", id=2, **call)
    assert raw_client.hear().header["id"] == 2


# --- clients that are slow, dead or gone ----------------------------------------------------------


def test_a_client_that_never_acknowledges_gets_a_window_and_merged_text_then_is_cut_off(
    served: Served,
    raw_client: RawClient,
    healthy: stemma.Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "RUNTIME_CREDIT_BYTES", 500)
    monkeypatch.setattr(wire, "ACK_AFTER_BYTES", 1)  # the healthy one acknowledges at once
    num_finished = healthy.get_server_info()["stats"]["num_finished"]
    raw_client.hello()
    ops = [GEN[0], [*GEN[1][:5], {"max_tokens": 400, "ignore_eos": True}]]
    raw_client.say_ops(1, ops, create={"stream": True}, end=True)
    wait_for(healthy, lambda info: info["stats"]["num_finished"] > num_finished)
    clients = list(served.gateway._host.clients.by_session.values())
    (client,) = [c for c in clients if c.events]
    assert client.link.unacked_bytes < 500 + 300, "the window"
    assert len(client.events._events) <= 3, "all later text is one event"
    asking = max((c for c in clients if c is not client), key=lambda c: c.last_heard_s)
    wait_until(lambda: not asking.behind_bytes)  # else it is the healthy one that goes
    monkeypatch.setattr(host_module, "MAX_BEHIND_BYTES", 600)
    reply = raw_client.hear()
    while reply.op in ("events", "credit"):
        reply = raw_client.hear()
    assert reply.op == "error" and "has not taken its results" in reply.header["message"]
    monkeypatch.undo()
    raw_client.say("ping")
    assert "has not taken its results" in raw_client.hear().header["message"], (
        "and it is told again"
    )
    assert program.run(backend=healthy)["x"]


def test_a_client_that_says_goodbye_frees_its_programs_at_once(
    raw_client: RawClient, healthy: stemma.Runtime
) -> None:
    raw_client.hello()
    raw_client.say_ops(1, GEN, create={})
    wait_for(healthy, lambda info: info["num_running"] == 1)
    raw_client.say("bye")
    wait_for(healthy, lambda info: info["num_running"] == info["num_programs"] == 0)


CLIENT = """
import sys, stemma
backend = stemma.Runtime(sys.argv[1])
@stemma.function
def program(s):
    s += "dead" + stemma.gen("x", max_tokens=3900, ignore_eos=True)
state = program.stream(backend=backend)
print("streaming", flush=True)
sys.stdin.read()
"""


def test_a_client_that_was_killed_is_forgotten_and_disturbs_nobody(
    served: Served, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.gateway._host, "_grace_s", 2.0)
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CLIENT, served.tcp_endpoint],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == b"streaming\n"
        wait_for(healthy, lambda info: info["num_running"] == 1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert program.run(backend=healthy)["x"]
    wait_for(healthy, lambda info: info["num_running"] == info["num_programs"] == 0)
    info = healthy.get_server_info()
    assert info["free_tokens"] + info["evictable_tokens"] == info["total_tokens"]


def test_connections_that_never_finish_their_greeting_disturb_nobody(
    served: Served, healthy: stemma.Runtime
) -> None:
    port = int(served.tcp_endpoint.rpartition(":")[2])
    greetings = [b"", b"\xff\x00\x00", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 4096]
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in greetings]
    for connection, greeting in zip(sockets, greetings, strict=True):
        connection.sendall(greeting)
    assert program.run(backend=healthy)["x"]
    for connection in sockets:
        connection.close()
    with stemma.Runtime(served.tcp_endpoint) as backend:
        assert program.run(backend=backend)["x"]


# --- limits ---------------------------------------------------------------------------------------


def failure(raw_client: RawClient) -> str:
    failed, done = raw_client.events()[-2:]
    assert (failed[3], done[3]) == (wire.FAILED, wire.DONE)
    return str(failed[4]["message"])


def test_limits_of_a_program_end_it_and_no_other(
    raw_client: RawClient, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw_client.hello()
    text = ["text", 0, 0, None, "a"]
    raw_client.say_ops(1, [["text", gateway_module.MAX_BRANCHES, 0, None, "a"]], create={})
    assert "branch=65536" in failure(raw_client)
    raw_client.say_ops(2, [["fork", 0, 0, None, [1, gateway_module.MAX_BRANCHES]]], create={})
    assert "branch=65536" in failure(raw_client)
    monkeypatch.setattr(clients_module, "MAX_OPS", 3)
    raw_client.say_ops(3, [["text", 0, i, None, "a"] for i in range(4)], create={})
    assert "at most 3 ops" in failure(raw_client)
    monkeypatch.setattr(clients_module, "MAX_PROGRAM_BYTES", 1000)
    raw_client.say("intern", texts=[[0, "x" * 400]])
    ops = [["text", 0, 0, None, 0], ["text", 0, 1, None, 0], ["text", 0, 2, None, 0]]
    raw_client.say_ops(4, ops, create={})
    assert "at most 1000 bytes" in failure(raw_client), "texts named by slot count in full"
    monkeypatch.setattr(clients_module, "MAX_PROGRAMS", 2)
    for number in (5, 6, 7):
        raw_client.say_ops(number, [text], create={})
    assert "at most 2 programs" in failure(raw_client)
    monkeypatch.setattr(clients_module, "MAX_CLIENT_BYTES", 500)
    raw_client.say_ops(6, [["text", 0, 1, None, "a" * 500]])
    assert "a client's programs may have at most 500" in failure(raw_client)
    raw_client.say_ops(5, [], end=True)
    assert [event[3] for event in raw_client.events()] == [wire.DONE]
    monkeypatch.undo()
    assert program.run(backend=healthy)["x"]


def test_a_client_too_many_is_refused(
    raw_client: RawClient, healthy: stemma.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "MAX_CLIENTS", 1)
    raw_client.say("hello")
    assert "serves at most 1 clients" in raw_client.hear().header["message"]
    assert program.run(backend=healthy)["x"]


def test_a_call_too_large_is_refused(raw_client: RawClient) -> None:
    raw_client.hello()
    raw_client.say("call", id=1, method="tokenize", args={"text": "a" * 3 * 2**20})
    assert "at most 2097152 are answered" in raw_client.hear().header["error"]


def test_a_batch_with_a_failing_program_over_a_session_still_names_it(
    healthy: stemma.Runtime,
) -> None:
    with pytest.raises(BatchError, match=r"\[1\]"):
        program.run_batch([{"max_tokens": 2}, {"max_tokens": -1}], backend=healthy)


def test_programs_run_on_the_account_that_their_client_names(
    served: Served,
    raw_client: RawClient,
    healthy: stemma.Runtime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tenants: list[object] = []
    engine = served.loaded.engine
    submit = engine.submit

    def noting(request: Request) -> None:
        assert request.program is not None
        tenants.append(request.program.tenant)
        submit(request)

    monkeypatch.setattr(engine, "submit", noting)
    with stemma.Runtime(served.endpoint, tenant="batch") as named:
        program.run(backend=named)
    program.run(backend=healthy)
    raw_client.hello()
    ops = [GEN[0], [*GEN[1][:5], {"max_tokens": 2}]]
    raw_client.say_ops(1, ops, create={"tenant": "web"}, end=True)
    raw_client.events()
    own = tenants[-2]
    assert tenants[0] == "batch" and tenants[-1] == "web"
    assert isinstance(own, str) and len(own) == 32, "a session is a tenant of its own"


@pytest.mark.parametrize("tenant", ["", "x" * 257, 7])
def test_a_tenant_that_is_no_name_is_refused(raw_client: RawClient, tenant: object) -> None:
    raw_client.say("hello", tenant=tenant)
    assert "tenant=" in raw_client.hear().header["message"]


def test_texts_belong_to_a_key_and_to_the_tenant_that_its_client_names() -> None:
    clients = clients_module.Clients(clients_module.Client[Any])

    def account(
        key: str | None, of_client: str | None = None, of_program: str | None = None
    ) -> Any:
        header = {} if of_client is None else {"tenant": of_client}
        return clients.greet(os.urandom(4), header, 0.0, key).account(of_program)

    assert account("a") == account("a") and account(None) == account(None)
    assert account("a", "x") == account("a", of_program="x") == account("a", "y", "x")
    apart = [account("a"), account("b"), account(None), account("a", "x"), account("b", "x")]
    assert len(set(apart)) == len(apart)
