"""Mixed load on a server for a while: memory stays flat, no page and no descriptor is lost."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_memory import growth_of, rss_mb
from raw_http import WAYS_TO_GO, RawClient

import stemma as st
from stemma.bench.harness.process_meter import num_descriptors, process_tree
from stemma.bench.serving.runners.ports import free_port
from stemma.frontend.protocol import ir, wire

NUM_CLIENTS = 8
SAMPLE_S = 1.0
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REFUSED: tuple[tuple[int, dict[str, Any] | bytes], ...] = (
    (400, b"{"),
    (400, b'{"prompt": "\xff\xfe"}'),
    (400, {"prompt": 7}),
    (400, {"prompt": "a", "n": 10**9}),
    (400, {"prompt": "a", "temperature": -1}),
    (400, {"prompt": "a", "regex": "("}),
    (400, {"prompt": "word " * 5000}),
    (404, {"prompt": "a", "model": "another"}),
)


@dataclass
class Server:
    """`stemma serve` with a small KV pool, so that pages are evicted all the time."""

    url: str
    endpoint: str
    pid: int
    seen: Counter[str] = field(default_factory=Counter)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port, endpoint = free_port(), f"ipc://{tmp_path}/soak.ipc"
    command = [sys.executable, "-m", "stemma", "serve", "--port", str(port)]
    command += ["--endpoint", endpoint, "--max-total-tokens", "8192"]
    command += ["--speculate", "off"]  # whose history grows, up to its bound
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.05)
    yield Server(url, endpoint, process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) in (0, 130, -signal.SIGINT)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_ten_seconds_of_mixed_load_leave_nothing(server: Server) -> None:
    soak(server, seconds=10, warm_up_s=4, most_growth_mb=8)


@pytest.mark.slow
def test_an_hour_of_mixed_load_leaves_nothing(server: Server) -> None:
    soak(server, seconds=3600, warm_up_s=600, most_growth_mb=12)


def soak(server: Server, seconds: float, warm_up_s: float, most_growth_mb: float) -> None:
    """Raises what a client was surprised by."""
    with st.Runtime(server.endpoint) as backend, httpx.Client(base_url=server.url) as http:
        for kind in KINDS:  # whatever is loaded or opened once
            kind(server, http, backend, random.Random(0))
        for seed in range(8):  # the KV pool, whose memory comes with its first use
            prompt = random.Random(seed).choices(range(300, 2000), k=1500)
            asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
            assert http.post("/generate", json=asked).status_code == 200
        pids = process_tree(server.pid)
        assert len(pids) >= 2, "no engine process"
        before = [num_descriptors(pid) for pid in pids]
        until = time.monotonic() + seconds
        samples: list[list[float]] = []
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [
                pool.submit(be_a_client, server, backend, until, seed)
                for seed in range(NUM_CLIENTS)
            ]
            warm_until = time.monotonic() + warm_up_s
            while time.monotonic() < until and not any(client.done() for client in clients):
                time.sleep(SAMPLE_S)
                if time.monotonic() > warm_until:
                    samples.append([rss_mb(pid) for pid in pids])
            for client in clients:
                client.result()
        assert set(server.seen) == {kind.__name__ for kind in KINDS}
        for pid, sizes in zip(pids, zip(*samples)):
            growth = growth_of(sizes)
            assert growth < most_growth_mb, f"{pid} grew by {growth:.1f} MB: {sizes}"
        http.close()
        wait_for(lambda: is_idle(backend))
        info = backend.get_server_info()
        assert info["free_tokens"] + info["cached_tokens"] == info["total_tokens"]
        assert info["evictable_tokens"] == info["cached_tokens"]
        wait_for(lambda: all(num_descriptors(p) <= most for p, most in zip(pids, before)))


def be_a_client(server: Server, backend: st.Runtime, until: float, seed: int) -> None:
    rng = random.Random(seed)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        while time.monotonic() < until or len(server.seen) < len(KINDS):
            kind = rng.choice(KINDS)
            kind(server, http, backend, rng)
            server.seen[kind.__name__] += 1


def chat_turns(server: Server, http: httpx.Client, backend: st.Runtime, rng: random.Random) -> None:
    messages = [{"role": "user", "content": f"Hi, my name is Nora {rng.randrange(100)}."}]
    for _ in range(rng.randint(1, 3)):
        body = {"messages": messages, "max_tokens": 24}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": "Go on"},
        ]


def stream(server: Server, http: httpx.Client, backend: st.Runtime, rng: random.Random) -> None:
    body = {"prompt": f"Story {rng.randrange(200)}:", "max_tokens": 40, "n": rng.choice((1, 1, 4))}
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200 and lines[-1] == "data: [DONE]", lines[-3:]
    ends = [json.loads(line[6:])["choices"][0]["finish_reason"] for line in lines[:-1]]
    assert len([end for end in ends if end]) == body["n"]


def leave(server: Server, http: httpx.Client, backend: st.Runtime, rng: random.Random) -> None:
    client = RawClient(server.url)
    body = {"prompt": f"Left {rng.randrange(200)}:", "max_tokens": 1000, "ignore_eos": True}
    client.post("/v1/completions", {**body, "stream": rng.random() < 0.5})
    time.sleep(rng.random() * 0.1)
    rng.choice(list(WAYS_TO_GO.values()))(client)
    client.close()


def schema_answer(
    server: Server, http: httpx.Client, backend: st.Runtime, rng: random.Random
) -> None:
    schema = {**SCHEMA, "title": f"Person {rng.randrange(20)}"}
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages = [{"role": "user", "content": "Text: Ada Moor is 34 years old.\nExtract as JSON."}]
    body = {"messages": messages, "response_format": wanted, "max_tokens": 200}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        assert set(json.loads(choice["message"]["content"])) == {"name", "age"}


def refused(server: Server, http: httpx.Client, backend: st.Runtime, rng: random.Random) -> None:
    status, body = rng.choice(REFUSED)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/completions", content=data, headers=headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def abort(server: Server, http: httpx.Client, backend: st.Runtime, rng: random.Random) -> None:
    sink = _Sink()
    connection = backend.connection
    program = connection.open_program(sink, {"seed": 1, "instance": 0, "stream": True})
    params = ir.GenParams(max_tokens=1000, ignore_eos=True)
    for op in (ir.Text(0, 0, None, f"Abort {rng.randrange(99)}"), ir.Gen(0, 1, None, "x", params)):
        connection.send_op(program, op)
    connection.flush(program, end=True)
    time.sleep(rng.random() * 0.05)
    connection.end_gens(program)
    assert sink.is_done.wait(120)
    assert sink.reasons == ["abort"] or sink.reasons == ["length"]


class _Sink:
    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.reasons: list[str] = []

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind == wire.VALUE:
            self.reasons.append(payload["meta"]["finish_reason"])
        elif kind == wire.DONE:
            self.is_done.set()

    def handle_disconnect(self, error: st.EngineError) -> None:
        self.is_done.set()


Kind = Callable[[Server, httpx.Client, st.Runtime, random.Random], None]
KINDS: tuple[Kind, ...] = (chat_turns, stream, leave, schema_answer, refused, abort)


def is_idle(backend: st.Runtime) -> bool:
    info = backend.get_server_info()
    return (info["num_running"], info["num_waiting"], info["num_programs"]) == (0, 0, 0)


def wait_for(what: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
