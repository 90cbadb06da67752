"""Clients that send too much, or nothing: the others, and the probes, are answered meanwhile."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import http_client, http_server
from server_process import ServerProcess, num_files
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.server.access import request_body
from stemma.server.protocol import connections, json_route

JSON = {"content-type": "application/json"}
LARGE = json.dumps({"prompt": "a" * json_route.LARGE_BYTES, "max_tokens": 1}).encode()
HELD = {"prompt": "a", "max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 3}


# --- large bodies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["parse_json", "_validated"])
def test_probes_are_answered_while_a_large_body_is_read(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    work = getattr(json_route, stage)

    def slowly(*args: Any) -> Any:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return work(*args)

    monkeypatch.setattr(json_route, stage, slowly)
    with http_client(embedded) as http, ThreadPoolExecutor() as pool:
        post = pool.submit(http.post, "/v1/completions", content=LARGE, headers=JSON)
        assert begun.wait(PATIENCE_S)
        try:
            assert httpx.get(f"{http.base_url}/live", timeout=PATIENCE_S).status_code == 200
        finally:
            may_end.set()
        assert post.result().status_code == 400, "longer than the context"


@pytest.mark.parametrize("value", ["1", "[1]", "[]", '"ab"', "{}", "null"])
def test_a_body_of_too_many_values_is_refused_and_not_decoded(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setattr(json_route, "_DECODER", None)
    body = f'{{"prompt": [{",".join([value] * 1_100_000)}]}}'.encode()
    with http_client(embedded, max_body_mb=32) as http:
        reply = http.post("/v1/completions", content=body, headers=JSON)
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "request_too_large"


def test_bodies_have_room_together_and_nobody_takes_all_of_it(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that are not whole, of one address; small ones are not counted."""
    monkeypatch.setattr(request_body, "ROOM_BYTES", 400_000)
    monkeypatch.setattr(request_body, "LARGEST_IN_ROOM", 1)
    with http_server(embedded, max_body_mb=0.3) as url, contextlib.ExitStack() as stack:
        head = post_head("/v1/completions", 250_000)
        clients = [stack.enter_context(connected(url)) for _ in range(2)]
        for client in clients:
            with contextlib.suppress(ConnectionError):
                client.sendall(head + b" " * 200_000)
        wait_until(
            lambda: 'method="POST",route="/v1/completions",status="503"} 1.0' in metrics(url)
        )
        small = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=small).status_code == 200


def test_a_body_that_comes_too_slowly_is_given_up(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "GRACE_S", 0.2)
    with http_server(embedded) as url, connected(url) as client:
        client.sendall(post_head("/v1/completions", 1000))
        assert answer_to_drops(client, b" ").startswith(b"HTTP/1.1 408")


# --- silent clients -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /li", b"HTTP/1.1 408"),
        (b"GET /live HTTP/1.1\r\nHost: a\r\nX: ", b"HTTP/1.1 408"),
        (b"\r\n", b""),
        (b"GET /live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 200"),
    ],
    ids=["nothing", "half a line", "half a head", "empty lines", "less than a body"],
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_connection_without_a_head_is_closed(
    embedded: st.Engine,
    monkeypatch: pytest.MonkeyPatch,
    sent: bytes,
    answer: bytes,
    goes_on: bool,
) -> None:
    """Also if something comes now and then."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.2)
    drop = b"\r\n" if sent in (b"", b"\r\n") else b"a"
    with http_server(embedded, keep_alive_s=1) as url, connected(url) as client:
        client.sendall(sent)
        received = answer_to_drops(client, drop) if goes_on else rest_of(client)
        assert received.startswith(answer) and bool(received) == bool(answer)


def test_a_client_does_not_pay_for_the_time_in_which_the_server_stood_still(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came meanwhile is read, whoever was in the middle of what: as after SIGSTOP."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 2.0)
    monkeypatch.setattr(request_body, "GRACE_S", 2.0)
    begun, read = threading.Event(), json_route.parse_json

    def stand_still(body: bytes) -> Any:
        if b"stand still" in body:
            begun.set()
            time.sleep(3.0)  # on the loop; longer than the limits
        return read(body)

    monkeypatch.setattr(json_route, "parse_json", stand_still)
    probe = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    post = post_head("/v1/completions", len(body)) + body
    parts = [(b"", probe), (probe[:9], probe[9:]), (post[:-20], post[-20:]), (post[:40], post[40:])]
    with http_server(embedded) as url, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(url)) for _ in parts]
        for client, (first, _) in zip(clients, parts, strict=True):
            client.sendall(first)
        culprit = stack.enter_context(connected(url))
        still = json.dumps({"prompt": "stand still", "max_tokens": 1}).encode()
        culprit.sendall(post_head("/v1/completions", len(still)) + still)
        assert begun.wait(PATIENCE_S)
        for client, (_, rest) in zip(clients, parts, strict=True):
            client.sendall(rest)
        for client in clients:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_reads_nothing_is_left(embedded: st.Engine) -> None:
    with http_server(embedded, stream_stall_s=0.1) as url, connected(url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(request * 100)  # more than all buffers hold
        wait_until(lambda: 'dropped_connections_total{reason="unread"} 1.0' in metrics(url))
        with pytest.raises(ConnectionResetError):
            while client.recv(1 << 16):
                pass


def test_whoever_asks_is_let_in_however_many_say_nothing(embedded: st.Engine) -> None:
    with http_server(embedded, max_connections=8) as url, contextlib.ExitStack() as stack:
        with streaming(url) as events:
            silent = [stack.enter_context(connected(url)) for _ in range(50)]
            for _ in range(5):
                assert httpx.get(f"{url}/live", timeout=PATIENCE_S).status_code == 200
            assert rest_of(silent[0]) == b"", "the first one that said nothing had to go"
            assert next(events), "the one that is busy had not"
        assert 'dropped_connections_total{reason="full"}' in metrics(url)


def test_probes_are_answered_where_all_connections_are_busy(embedded: st.Engine) -> None:
    with http_server(embedded, max_connections=3) as url, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(streaming(url))
        for path in ("/live", "/health", "/ready"):
            reply = httpx.get(url + path, timeout=PATIENCE_S)
            assert (reply.status_code, reply.headers["connection"]) == (200, "close")
        reply = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "too_many_connections"


def test_few_files_are_enough_for_the_probes_under_many_connections(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, max_files=256) as server, contextlib.ExitStack() as stack:
        for number in range(400):
            stack.enter_context(connected(server.url))
            if number % 100 == 0:
                assert server.status("/live") == 200
        assert server.status("/health") == 200
        assert num_files(server.process.pid) < 256
        assert "stemma_http_loop_lag_seconds_count" in metrics(server.url)
        assert server.generate().status_code == 200


def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def post_head(path: str, length: int) -> bytes:
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


def rest_of(client: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while more := client.recv(1 << 16):
            received += more
    return received


def answer_to_drops(client: socket.socket, drop: bytes) -> bytes:
    """What comes until the connection is closed, while a little is sent now and then."""
    is_over = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(0.02):
                client.sendall(drop)

    with ThreadPoolExecutor() as pool:
        pool.submit(trickle)
        try:
            return rest_of(client)
        finally:
            is_over.set()


@contextlib.contextmanager
def streaming(url: str) -> Iterator[Iterator[bytes]]:
    """A stream that has begun."""
    timeout = httpx.Timeout(PATIENCE_S)
    with httpx.stream("POST", f"{url}/v1/completions", json=HELD, timeout=timeout) as reply:
        events = reply.iter_bytes()
        next(events)
        yield events


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
