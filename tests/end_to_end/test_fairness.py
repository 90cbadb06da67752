"""One key's share of a whole server beside another that floods it, in tokens."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from http_server import http_server
from waiting import wait_until

import stemma as st
from stemma.server.access.api_keys import new_key

GOOD, HOSTILE = new_key(), new_key()
NUM_ROWS = 8
WAIT_S = 120.0  # for what must come


def ask(url: str, key: str, body: dict[str, Any]) -> int:
    """Tokens of an answer; 0 where it was refused."""
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
    assert reply.status_code in (200, 429), reply.text
    return int(reply.json()["usage"]["completion_tokens"]) if reply.status_code == 200 else 0


@contextmanager
def flood(url: str, hold_s: Sequence[float]) -> Iterator[None]:
    """Long prompts with n=64 in streams that nobody reads, each for so long, until it is left."""
    is_over = threading.Event()
    body = {"prompt": "word " * 200, "n": 64, "max_tokens": 1000, "ignore_eos": True}

    def stream(seconds: float) -> None:
        headers = {"authorization": f"Bearer {HOSTILE}"}
        while not is_over.is_set():
            with httpx.stream(
                "POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=headers,
                timeout=WAIT_S,
            ) as reply:  # fmt: skip
                if reply.status_code == 429:
                    is_over.wait(0.05)
                    continue
                chunks = reply.iter_raw()  # kept: once it is collected the response is closed
                next(chunks)
                is_over.wait(seconds)  # and it reads no more

    floods = [threading.Thread(target=stream, args=(s,)) for s in hold_s]
    for each in floods:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in floods:
            each.join(WAIT_S)


@pytest.mark.parametrize(
    "num_requests", [24, pytest.param(400, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_key_below_its_share_waits_for_nothing_of_a_flood(num_requests: int) -> None:
    """Every request of its own is let in and answered whole; the first ones while the flood has
    every row, and before any of its samples has ended."""
    mine = {"prompt": "hello", "max_tokens": 16, "ignore_eos": True}
    with st.Engine(max_total_tokens=32_768, max_running_requests=NUM_ROWS) as engine:
        with http_server(engine, api_key=(GOOD, HOSTILE), max_queued_requests=512) as url:
            with flood(url, (WAIT_S,) * 4):
                while engine.get_server_info()["num_running"] < NUM_ROWS:
                    threading.Event().wait(0.01)
                before = num_finished(engine)
                first = [ask(url, GOOD, mine) for _ in range(4)]
                num_ended = num_finished(engine) - before
            with flood(url, (WAIT_S,) * 4 + (2.0,) * 2):
                with ThreadPoolExecutor(2) as two:
                    rest = list(two.map(lambda _: ask(url, GOOD, mine), range(num_requests)))
    assert first == [16] * 4 and num_ended == 4, f"{num_ended} have ended, 4 of them its own"
    assert rest == [16] * num_requests, "tokens; 0: refused"


def test_a_key_has_its_grammar_beside_many_slow_ones_of_another() -> None:
    mine = {"prompt": "x", "max_tokens": 8, "regex": "[ab]{4}"}
    with st.Engine(max_total_tokens=8192) as engine, ExitStack() as held:
        url = held.enter_context(http_server(engine, api_key=(GOOD, HOSTILE)))
        assert ask(url, GOOD, {**mine, "regex": "[01]{4}"})  # the compiler has started
        for number in range(150):
            words = "|".join(f"[ab]*a[ab]{{12}}x{word}y{number}" for word in range(60))
            body = {"prompt": "x", "max_tokens": 8, "regex": words}
            held.enter_context(begun(url, HOSTILE, body))
        wait_until(lambda: num_requests(engine) >= 100)
        before = num_compiled(engine)
        assert ask(url, GOOD, mine)
        assert num_compiled(engine) - before < 50, "grammars that it waited for, and its own"


def begun(url: str, key: str, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody reads."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), WAIT_S)
    connection.sendall(head.encode() + content)
    return connection


def num_requests(engine: st.Engine) -> int:
    info = engine.get_server_info()
    return int(info["num_waiting"] + info["num_running"])


def num_compiled(engine: st.Engine) -> int:
    grammars = engine.get_server_info()["grammars"]
    return int(grammars["num_compiled"] + grammars["num_refused"])


def num_finished(engine: st.Engine) -> int:
    return int(engine.get_server_info()["stats"]["num_finished"])
