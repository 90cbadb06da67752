"""Bytes that a proxy and a server may read differently: each is refused, or means one request.

Raw sockets and a whole server with keys. Behind each case comes a request of its own: it is
answered if the case has left the connection in order, and never by what the case contains.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from http_server import http_server
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.server.access.api_keys import new_key

KEY = new_key()
HOST, AUTH = "Host: localhost", f"Authorization: Bearer {KEY}"
BODY = b'{"text": "a"}'
LENGTH = f"Content-Length: {len(BODY)}"
UPGRADE, H2C = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
OPEN_CHUNKS = CHUNKS[:-2]  # a trailer may follow
VERSION = "GET /version HTTP/1.1"
LAST = f"{VERSION}\r\n{HOST}\r\nX-Request-Id: last\r\nConnection: close\r\n\r\n".encode()
INNER = f"{VERSION}\r\n{HOST}\r\n{AUTH}\r\nX-Request-Id: inner\r\n\r\n".encode()

Answers = list[tuple[int, str]]
"""Statuses, and which request they answer: none that is known where it was no HTTP."""

UNREADABLE: Answers = [(400, "")]
FINE: Answers = [(200, "case"), (200, "last")]


def head(line: str, *headers: str) -> bytes:
    lines = (line, "X-Request-Id: case", *headers, "", "")
    return "\r\n".join(lines).encode("latin-1")


def post(*headers: str, body: bytes = BODY) -> bytes:
    """A request that needs a key, has one, and has a body."""
    kind = "Content-Type: application/json"
    return head("POST /tokenize HTTP/1.1", HOST, AUTH, kind, *headers) + body


def get(*headers: str, line: str = "GET /v1/models HTTP/1.1") -> bytes:
    """A request that needs a key and has one."""
    return head(line, HOST, AUTH, *headers)


def with_trailer(trailer: bytes) -> bytes:
    return post(CHUNKED, body=OPEN_CHUNKS + trailer + b"\r\n\r\n")


CASES: dict[str, tuple[bytes, Answers]] = {
    "a body of a length": (post(LENGTH), FINE),
    "a body of chunks": (post(CHUNKED, body=CHUNKS), FINE),
    # The body's length is ambiguous.
    "both lengths": (post(LENGTH, CHUNKED, body=CHUNKS), UNREADABLE),
    "both lengths, chunks first": (post(CHUNKED, LENGTH, body=CHUNKS), UNREADABLE),
    "a request behind the last chunk": (
        post(f"Content-Length: {5 + len(INNER)}", CHUNKED, body=b"0\r\n\r\n" + INNER),
        UNREADABLE,
    ),
    "the same length twice": (post(LENGTH, LENGTH), UNREADABLE),
    "two lengths": (post(LENGTH, "Content-Length: 0"), UNREADABLE),
    "a list of lengths": (post(f"{LENGTH}, {len(BODY)}"), UNREADABLE),
    "a length with a sign": (post(f"Content-Length: +{len(BODY)}"), UNREADABLE),
    "a negative length": (post("Content-Length: -1"), UNREADABLE),
    "a hexadecimal length": (post("Content-Length: 0xd"), UNREADABLE),
    "a length with a space in it": (post("Content-Length: 1 3"), UNREADABLE),
    "a length as Python writes it": (post("Content-Length: 1_3"), UNREADABLE),
    "an empty length": (post("Content-Length: "), UNREADABLE),
    "an endless length": (post(f"Content-Length: {'9' * 30}"), UNREADABLE),
    "no known encoding": (post("Transfer-Encoding: xchunked", body=CHUNKS), UNREADABLE),
    "no encoding": (post("Transfer-Encoding: identity", LENGTH), UNREADABLE),
    "another encoding below": (
        post("Transfer-Encoding: gzip, chunked", body=CHUNKS),
        [(501, "case")],
    ),
    "another encoding above": (
        post("Transfer-Encoding: chunked, identity", body=CHUNKS),
        UNREADABLE,
    ),
    "chunked twice": (post(CHUNKED, CHUNKED, body=CHUNKS), UNREADABLE),
    "chunked and not": (post(CHUNKED, "Transfer-Encoding: identity", body=CHUNKS), UNREADABLE),
    "chunked in capitals": (post("TRANSFER-ENCODING: CHUNKED", body=CHUNKS), FINE),
    "chunked in quotes": (post('Transfer-Encoding: "chunked"', body=CHUNKS), UNREADABLE),
    "chunked behind a tab": (post("Transfer-Encoding: \x0bchunked", body=CHUNKS), UNREADABLE),
    "chunked before a NUL": (post(f"{CHUNKED}\0", body=CHUNKS), UNREADABLE),
    "chunked on another line": (post("Transfer-Encoding:\r\n chunked", body=CHUNKS), UNREADABLE),
    "chunked in HTTP/1.0": (head("POST /tokenize HTTP/1.0", CHUNKED) + CHUNKS, [(400, "case")]),
    # Chunks.
    "chunks with extensions": (
        post(CHUNKED, body=CHUNKS.replace(b"\r\n{", b";a=b\r\n{").replace(b"\r\n0", b"\r\n0;c")),
        FINE,
    ),
    "a bare LF behind an extension": (
        post(CHUNKED, body=CHUNKS.replace(b"\r\n{", b";a\n{")),
        UNREADABLE,
    ),
    "a size with 0x": (post(CHUNKED, body=b"0x" + CHUNKS), UNREADABLE),
    "a negative size": (post(CHUNKED, body=b"-" + CHUNKS), UNREADABLE),
    "a size with a space": (post(CHUNKED, body=CHUNKS.replace(b"\r\n{", b" \r\n{")), UNREADABLE),
    "a size beyond 64 bits": (post(CHUNKED, body=b"f" * 17 + b"\r\n"), UNREADABLE),
    "no size": (post(CHUNKED, body=b"\r\n" + CHUNKS), UNREADABLE),
    "bare LFs between chunks": (post(CHUNKED, body=CHUNKS.replace(b"\r", b"")), UNREADABLE),
    "a chunk that is longer": (post(CHUNKED, body=CHUNKS.replace(b"}", b"}}")), UNREADABLE),
    "a chunk that is shorter": (post(CHUNKED, body=CHUNKS.replace(b"}", b"")), UNREADABLE),
    # Trailers.
    "a key in the trailer": (
        post(CHUNKED, body=OPEN_CHUNKS).replace(AUTH.encode() + b"\r\n", b"")
        + f"{AUTH}\r\n\r\n".encode(),
        [(401, "case"), (200, "last")],
    ),
    "an id in the trailer": (with_trailer(b"X-Request-Id: inner"), FINE),
    "a host in the trailer": (with_trailer(b"Host: elsewhere.example"), FINE),
    "an expectation in the trailer": (with_trailer(b"Expect: 100-continue"), FINE),
    "a length in the trailer": (with_trailer(b"Content-Length: 5"), UNREADABLE),
    "an encoding in the trailer": (with_trailer(CHUNKED.encode()), UNREADABLE),
    "a huge trailer": (with_trailer(b"X: " + b"a" * 2_000_000), [(431, "")]),
    "many trailers": (with_trailer(b"\r\n".join([b"X: " + b"a" * 1000] * 2000)), [(431, "")]),
    # Lines and names.
    "a space before the colon": (post(LENGTH.replace(":", " :")), UNREADABLE),
    "a tab before the colon": (post(LENGTH.replace(":", "\t:")), UNREADABLE),
    "a folded header": (get("X-A: a\r\n b"), UNREADABLE),
    "a folded key": (get(f"X-A: a\r\n {AUTH}"), UNREADABLE),
    "bare LFs": (get().replace(b"\r", b""), UNREADABLE),
    "a bare LF in a header": (get("X-A: a\nX-Request-Id: inner"), UNREADABLE),
    "a bare CR in a header": (get("X-A: a\rX-Request-Id: inner"), UNREADABLE),
    "a space before the first header": (get().replace(b"X-", b" X-", 1), UNREADABLE),
    "a space in a name": (get("X A: b"), UNREADABLE),
    "a name alone": (get("X-A"), UNREADABLE),
    "no name": (get(": a"), UNREADABLE),
    "a NUL in a value": (get("X-A: a\0b"), UNREADABLE),
    "a NUL in a name": (get("X-\0A: b"), UNREADABLE),
    "a NUL in the target": (get(line="GET /v1/models\0 HTTP/1.1"), UNREADABLE),
    "no ASCII in a name": (get("X-\xe9: a"), UNREADABLE),
    "no ASCII in a value": (get("X-A: \xff"), FINE),
    "headers of 80 kB": (get(*["X: " + "a" * 1000] * 80), [(431, "case"), (200, "last")]),
    "a header of 2 MB": (get("X: " + "a" * 2_000_000), [(431, "")]),
    "a target of 70 kB": (get(line=f"GET /{'a' * 70_000} HTTP/1.1"), UNREADABLE),
    # Who asks, and whom.
    "two keys": (get("Authorization: Bearer other"), [(400, "case")]),
    "two keys, the other way round": (
        head("GET /v1/models HTTP/1.1", HOST, "Authorization: Bearer other", AUTH),
        [(400, "case")],
    ),
    "two hosts": (get("Host: elsewhere.example"), [(400, "case")]),
    "no host": (head("GET /version HTTP/1.1"), [(400, "case")]),
    # Targets, versions, methods.
    "an absolute target": (get(line="GET http://localhost/v1/models HTTP/1.1"), FINE),
    "a target with a space": (get(line="GET /v1/models /a HTTP/1.1"), UNREADABLE),
    "a target without a path": (get(line="GET localhost:80 HTTP/1.1"), UNREADABLE),
    "two slashes": (get(line="GET //v1/models HTTP/1.1"), [(404, "case"), (200, "last")]),
    "a tunnel": (get(line="CONNECT localhost:80 HTTP/1.1"), UNREADABLE),
    "HTTP/0.9": (b"GET /v1/models\r\n", UNREADABLE),
    "HTTP/1.2": (get(line="GET /v1/models HTTP/1.2"), UNREADABLE),
    "HTTP/2.0": (get(line="GET /v1/models HTTP/2.0"), [(505, "case")]),
    "the beginning of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", UNREADABLE),
    "a method in small letters": (get(line="get /v1/models HTTP/1.1"), UNREADABLE),
    "a method of its own": (get(line="SMUGGLE /v1/models HTTP/1.1"), UNREADABLE),
    # A request within a request.
    "a request as a GET's body": (get(f"Content-Length: {len(INNER)}") + INNER, FINE),
    "a request as a GET's chunk": (
        get(CHUNKED) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(INNER), INNER),
        FINE,
    ),
    "a request behind an upgrade": (
        get(UPGRADE, H2C) + INNER,
        [(200, "case")],
    ),
    "an upgrade with a body": (post(UPGRADE, H2C, LENGTH) + INNER, [(200, "case")]),
    "an upgrade with chunks": (post(UPGRADE, H2C, CHUNKED, body=CHUNKS) + INNER, [(200, "case")]),
    "an upgrade with a trailer": (
        post(UPGRADE, H2C, CHUNKED, body=OPEN_CHUNKS + b"Host: elsewhere.example\r\n\r\n"),
        [(200, "case")],
    ),
    "an upgrade with both lengths": (
        post(UPGRADE, H2C, LENGTH, CHUNKED, body=CHUNKS),
        UNREADABLE,
    ),
    "a request behind the last one": (get("Connection: close") + INNER, [(200, "case")]),
    # Several requests.
    "empty lines before a request": (b"\r\n\r\n" + get(), FINE),
    "pipelined requests": (
        get() + head("GET /v1/models HTTP/1.1", HOST) + post(LENGTH) + get(),
        [(200, "case"), (401, "case"), (200, "case"), *FINE],
    ),
    "an expectation": (post("Expect: 100-continue", LENGTH), [(100, ""), *FINE]),
}


@pytest.fixture(scope="module")
def url(embedded: st.Engine) -> Iterator[str]:
    with http_server(embedded, api_key=(KEY,)) as url:
        yield url


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_refused_or_means_what_it_says(url: str, name: str) -> None:
    sent, expected = CASES[name]
    answers, is_whole = answers_to(url, sent + LAST)
    assert answers == (expected if is_whole else expected[: len(answers)])


def test_a_client_that_pipelines_and_leaves_is_no_error(
    url: str, embedded: st.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"prompt": "a", "max_tokens": 1900, "ignore_eos": true, "stream": true}'
    line, kind = "POST /v1/completions HTTP/1.1", "Content-Type: application/json"
    with connected(url) as client:
        client.sendall(head(line, HOST, AUTH, kind, f"Content-Length: {len(body)}") + body)
        assert client.recv(64).startswith(b"HTTP/1.1 200")
        client.sendall(get())
        assert client.recv(1 << 16)
    wait_until(lambda: not embedded.get_server_info()["num_programs"])
    assert answers_to(url, LAST) == ([(200, "last")], True)
    assert not caplog.text


def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def answers_to(url: str, data: bytes) -> tuple[Answers, bool]:
    """What comes until the server closes the connection; whether all of it came: a reset takes away
    the answer to what is refused while it is being sent."""
    received, is_whole = b"", True
    with connected(url) as client:
        try:
            client.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            is_whole = False
        try:
            while more := client.recv(1 << 16):
                received += more
        except ConnectionResetError:
            is_whole = False
    heads = re.findall(rb"HTTP/1\.1 (\d+) (.*?)\r\n\r\n", received, re.DOTALL)
    return [(int(status), id_in(rest)) for status, rest in heads], is_whole


def id_in(head: bytes) -> str:
    found = re.search(rb"^x-request-id: (\S+)", head, re.MULTILINE)
    return found[1].decode() if found else ""
