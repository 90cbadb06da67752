"""Streams and their readers: those who leave, those who do not read, and those who are many."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from engine_thread import Backend, engine_in_thread
from raw_http import WAYS_TO_GO, RawClient, events_of

import stemma as st
from stemma.server.app import create_app
from stemma.server.generation.service import Service
from stemma.server.http_server import uvicorn_config
from stemma.server.protocol.server_sent_events import PING
from stemma.server.settings import ServerSettings

LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "temperature": 1}
STREAMED = {**LONG, "stream": True}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 1500,
    "ignore_eos": True,
}
CUT_STREAMS = "stemma_http_cut_streams_total"
PROMPT_OF_MANY_STEPS = "word " * 700


@dataclass(frozen=True)
class Serving:
    """A server in a thread of this process, and its service."""

    url: str
    service: Service

    @property
    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics").text


@contextmanager
def serving(engine: st.Engine, **settings: Any) -> Iterator[Serving]:
    app = create_app(engine, ServerSettings(**settings))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of its connections, too
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, app.state.service))
    run = {"sockets": [listener]}
    thread = threading.Thread(target=server.run, kwargs=run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield Serving(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.service)
    server.should_exit = True
    thread.join(120)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Iterator[Backend]:
    """An engine that runs one request at a time and takes many steps for a long prompt."""
    options = {"max_running_requests": 1, "chunked_prefill_size": 16, "num_threads": 1}
    with engine_in_thread(
        checkpoint, dtype="float32", max_total_tokens=16_384, **options
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def wide_url(embedded: st.Engine) -> Iterator[Serving]:
    with serving(embedded) as server:
        yield server


@pytest.fixture(scope="module")
def narrow_url(narrow: Backend) -> Iterator[Serving]:
    with serving(narrow) as server:
        yield server


def counts(backend: st.Engine | st.Runtime) -> tuple[int, int, int]:
    info = backend.get_server_info()
    return info["num_running"], info["num_waiting"], info["num_programs"]


def wait_for(what: Callable[[], object], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def assert_nothing_is_left(backend: st.Engine | st.Runtime, within_s: float = 120.0) -> None:
    wait_for(lambda: counts(backend) == (0, 0, 0), within_s)
    info = backend.get_server_info()
    assert info["free_tokens"] + info["cached_tokens"] == info["total_tokens"]


# --- readers that leave ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", WAYS_TO_GO)
def test_a_client_that_goes_stops_its_decoding(
    way: str, stream: bool, wide_url: Serving, embedded: st.Engine
) -> None:
    client = RawClient(wide_url.url)
    client.post("/v1/completions", {**LONG, "n": 2, "stream": stream})
    wait_for(lambda: counts(embedded)[0] == 2)
    if stream:
        client.read_until(b"data: ")
    before = embedded.get_server_info()["stats"]["num_steps"]
    WAYS_TO_GO[way](client)
    assert_nothing_is_left(embedded)
    steps = embedded.get_server_info()["stats"]["num_steps"] - before
    assert steps < 1200, f"it ran {steps} steps more, of 1500"
    client.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_while_its_request_waits_is_never_run(
    stream: bool, narrow_url: Serving, narrow: Backend
) -> None:
    first, second = RawClient(narrow_url.url), RawClient(narrow_url.url)
    first.post("/v1/completions", {**STREAMED, "max_tokens": 3000})
    first.read_until(b"data: ")
    second.post("/v1/completions", {**LONG, "prompt": "Twice", "stream": stream})
    wait_for(lambda: counts(narrow) == (1, 1, 2))
    second.close()
    wait_for(lambda: counts(narrow) == (1, 0, 1))
    first.close()
    assert_nothing_is_left(narrow)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_during_prefill_stops_it(
    stream: bool, narrow_url: Serving, narrow: Backend
) -> None:
    narrow.flush_cache()
    before = narrow.get_server_info()["stats"]["num_computed_tokens"]
    client = RawClient(narrow_url.url)
    client.post("/v1/completions", {**LONG, "prompt": PROMPT_OF_MANY_STEPS, "stream": stream})
    wait_for(lambda: counts(narrow)[0] == 1)
    client.close()
    assert_nothing_is_left(narrow)
    computed = narrow.get_server_info()["stats"]["num_computed_tokens"] - before
    assert computed < len(PROMPT_OF_MANY_STEPS), "the whole prompt was computed for nobody"


@pytest.mark.parametrize("way", WAYS_TO_GO)
def test_a_client_that_goes_without_having_read_is_noticed(
    way: str, wide_url: Serving, embedded: st.Engine
) -> None:
    client = RawClient(wide_url.url, receive_bytes=4096)
    client.post("/v1/completions", {**STREAMED, "n": 16})
    assert blocked_stream(wide_url)
    WAYS_TO_GO[way](client)
    assert_nothing_is_left(embedded)
    wait_for(lambda: wide_url.service.running.num_requests == 0)
    client.close()


def blocked_stream(server: Serving) -> bool:
    """Wait until the server cannot write on."""
    running = server.service.running
    wait_for(lambda: any(g.num_waiting_bytes > 200 for g in list(running._generations)), 20)
    return True


def test_a_storm_of_clients_that_leave_leaves_nothing(served: Any) -> None:
    rng = random.Random(1)
    pids = [served.process.pid, *children(served.process.pid)]

    def storm(number: int) -> None:
        for _ in range(2):
            client = RawClient(served.url)
            stream, n = rng.random() < 0.7, rng.choice((1, 1, 3))
            body = {**LONG, "prompt": f"Storm {rng.randrange(30)}", "stream": stream, "n": n}
            client.post("/v1/completions", body)
            if stream and rng.random() < 0.7:
                client.read_until(b"data: ", at_once=rng.choice((1, 7, 4096)))
            time.sleep(rng.random() * 0.05)
            rng.choice(list(WAYS_TO_GO.values()))(client)
            client.close()

    with st.Runtime(served.endpoint) as backend:
        httpx.get(f"{served.url}/health")
        before = descriptors(pids)
        with ThreadPoolExecutor(200) as pool:
            list(pool.map(storm, range(200)))
        assert_nothing_is_left(backend)
        wait_for(lambda: all(now <= then for now, then in zip(descriptors(pids), before)))


def descriptors(pids: list[int]) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- readers that do not read ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"stream_stall_s": 0.4}, "stalled"),
        ({"max_stream_buffer_kb": 1, "stream_ping_s": 1}, "behind"),
    ],
)
def test_a_reader_that_does_not_read_is_cut_off(
    settings: dict[str, Any], reason: str, embedded: st.Engine
) -> None:
    with serving(embedded, **settings) as server:
        client = RawClient(server.url, receive_bytes=4096)
        client.post("/v1/completions", {**STREAMED, "n": 16})
        running = server.service.running
        counted = f'{CUT_STREAMS}{{reason="{reason}"}} 1.0'
        wait_for(lambda: counted in server.metrics)
        assert_nothing_is_left(embedded)
        wait_for(lambda: (running.num_requests, running.num_streams) == (0, 0))
        with pytest.raises(ConnectionError):  # the connection is gone, not just silent
            client.read_all()
        client.close()


def test_a_slow_reader_gets_everything_in_fewer_events(wide_url: Serving) -> None:
    body = {**STREAMED, "max_tokens": 250, "n": 16, "seed": 3}
    fast, slow = RawClient(wide_url.url), RawClient(wide_url.url, receive_bytes=4096)
    slow.post("/v1/completions", body)
    blocked_stream(wide_url)
    fast.post("/v1/completions", body)
    texts, sizes = [], []
    for client in (fast, slow):
        events = events_of(client.read_all())
        choices = [event["choices"][0] for event in events]
        texts.append(["".join(c["text"] for c in choices if c["index"] == i) for i in range(8)])
        sizes.append(len(events))
        client.close()
    assert texts[0] == texts[1]
    assert sizes[1] < sizes[0]


def test_readers_of_any_pace_get_the_same_events(wide_url: Serving) -> None:
    rng = random.Random(2)
    body = {**STREAMED, "max_tokens": 40, "seed": 5}

    def text_of(at_once: int) -> str:
        client = RawClient(wide_url.url)
        client.post("/v1/completions", body)
        events = events_of(client.read_all(at_once))
        client.close()
        return "".join(event["choices"][0]["text"] for event in events)

    assert len({text_of(at_once) for at_once in (65_536, 1, *rng.choices(range(2, 90), k=5))}) == 1


# --- the stream itself ----------------------------------------------------------------------------


def test_a_stream_says_that_nothing_may_keep_it(wide_url: Serving) -> None:
    with httpx.stream("POST", f"{wide_url.url}/v1/completions", json=STREAMED) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"


def test_a_silent_stream_pings_and_openais_client_does_not_mind(narrow: Backend) -> None:
    with serving(narrow, stream_ping_s=0.1) as server:
        first, second = RawClient(server.url), RawClient(server.url)
        first.post("/v1/completions", {**STREAMED, "max_tokens": 4000})
        first.read_until(b"data: ")
        short = {**STREAMED, "prompt": "Twice", "max_tokens": 3}
        second.post("/v1/completions", short)
        assert second.read_until(PING).startswith(b"HTTP/1.1 200")
        assert b"data: " not in second.read_until(PING)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with ThreadPoolExecutor(1) as pool:
            asked = {name: value for name, value in short.items() if name != "ignore_eos"}
            third = pool.submit(lambda: list(client.completions.create(model="", **asked)))
            time.sleep(0.5)
            first.close()
            assert third.result()[-1].choices[0].finish_reason in ("stop", "length")
        assert second.read_all().count(b"data: [DONE]") == 1
        second.close()


def test_a_silent_stream_of_lines_pings_with_an_empty_text(narrow: Backend) -> None:
    with serving(narrow, stream_ping_s=0.1) as server:
        first, second = RawClient(server.url), RawClient(server.url)
        first.post("/v1/completions", {**STREAMED, "max_tokens": 4000})
        first.read_until(b"data: ")
        options = {"num_predict": 3, "temperature": 3.0}
        second.post("/api/generate", {"prompt": "x", "raw": True, "options": options})
        ping = b'"response":"","done":false}\n'
        second.read_until(ping)
        assert PING not in second.read_until(ping)
        first.close()
        assert second.read_all().count(b'"done":true') == 1
        second.close()


def test_a_refusal_of_a_stream_has_its_own_status(wide_url: Serving) -> None:
    answer = httpx.post(f"{wide_url.url}/v1/completions", json={**STREAMED, "regex": "("})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "regex"


# --- aborted --------------------------------------------------------------------------------------


def abort(server: Serving, *, tenant: str = "", **body: Any) -> int:
    headers = {"x-stemma-tenant": tenant}
    answer = httpx.post(f"{server.url}/abort", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    num_aborted: int = answer.json()["aborted"]
    return num_aborted


def test_an_aborted_stream_ends_with_what_it_has(wide_url: Serving, embedded: st.Engine) -> None:
    client = RawClient(wide_url.url)
    options = {"n": 2, "stream_options": {"include_usage": True}}
    client.post("/v1/completions", {**STREAMED, **options})
    begun = client.read_until(b"\n\n")
    id = begun.split(b'"id":"')[1].split(b'"')[0].decode()
    assert abort(wide_url, rid="cmpl-another") == 0
    assert abort(wide_url, rid=id, tenant="another") == 0
    assert abort(wide_url, rid=id) == 1
    events = events_of(begun + client.read_all())
    reasons = [c["finish_reason"] for event in events for c in event["choices"]]
    assert [reason for reason in reasons if reason] == ["abort", "abort"]
    assert 0 < events[-1]["usage"]["completion_tokens"] < 3000
    assert_nothing_is_left(embedded)
    client.close()


def test_all_of_a_callers_answers_are_aborted_also_those_that_wait(
    narrow_url: Serving, narrow: Backend
) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(
                httpx.post,
                f"{narrow_url.url}/v1/completions",
                json={**LONG, "prompt": f"{number}:", "max_tokens": 4000},
                timeout=120,
            )
            for number in range(3)
        ]
        wait_for(lambda: counts(narrow) == (1, 2, 3))
        assert narrow_url.service.running.num_requests == 3
        assert abort(narrow_url, abort_all=True) == 3
        answers = [answer.result().json() for answer in asked]
    assert [a["choices"][0]["finish_reason"] for a in answers] == ["abort"] * 3
    assert max(a["usage"]["completion_tokens"] for a in answers) < 4000
    assert_nothing_is_left(narrow)
    assert narrow_url.service.running.num_requests == 0


def test_a_request_is_aborted_by_the_id_that_it_brought(
    wide_url: Serving, embedded: st.Engine
) -> None:
    client = RawClient(wide_url.url)
    client.post("/v1/chat/completions", {**CHAT, "rid": "mine", "stream": True})
    begun = client.read_until(b"data: ")
    assert abort(wide_url, rid="mine") == 1
    assert b'"finish_reason":"abort"' in begun + client.read_all()
    assert abort(wide_url, rid="mine") == 0
    assert_nothing_is_left(embedded)
    client.close()


@pytest.mark.parametrize("body", [{}, {"rid": "x", "abort_all": True}, {"rid": ""}])
def test_an_abort_says_what_it_means(body: dict[str, Any], wide_url: Serving) -> None:
    answer = httpx.post(f"{wide_url.url}/abort", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "id"
