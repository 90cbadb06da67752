"""Each kind of load on a server of its own: its processes do not grow with the number of requests.

What caches of grammars say that they hold is left out, and a tenth of it for what malloc loses; so
a cache that counts less than it holds is found as well, before it is full. Every request is unlike
all before it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_memory import growth_of, rss_mb
from raw_http import WAYS_TO_GO, RawClient
from server_process import ServerProcess
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.bench.harness.process_meter import process_tree

NUM_CLIENTS = 4
NUM_SAMPLES = 30
MOST_GROWTH_MB = 6.0
COMPLETIONS = "/v1/completions"


def plain(server: ServerProcess, http: httpx.Client, number: int) -> None:
    assert complete(http, f"Story {number}:").status_code == 200


def schema(server: ServerProcess, http: httpx.Client, number: int) -> None:
    """An automaton of its own, of some hundred states."""
    names = [f"k{number}", f"{number}k", "age"]
    properties = {name: {"type": "string", "maxLength": 9} for name in names}
    fields = {"type": "object", "properties": properties, "required": names}
    fields["additionalProperties"] = False
    assert complete(http, "Who?", json_schema=json.dumps(fields)).status_code == 200


def recursive_schema(server: ServerProcess, http: httpx.Client, number: int) -> None:
    """No automaton."""
    node = {"type": "object", "properties": {f"n{number}": {"$ref": "#/$defs/node"}}}
    fields = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    assert complete(http, "Tree:", json_schema=json.dumps(fields)).status_code == 200


def regex(server: ServerProcess, http: httpx.Client, number: int) -> None:
    assert complete(http, "A word:", regex=rf"(foo{number}|ba)[a-z]{{3,9}}\w+").status_code == 200


def ebnf(server: ServerProcess, http: httpx.Client, number: int) -> None:
    rules = f'start: "a{number}" start "b" | /[a-z]+[0-9]*/'
    assert complete(http, "A word:", ebnf=rules).status_code == 200


def program(server: ServerProcess, http: httpx.Client, number: int) -> None:
    with st.Runtime(server.endpoint) as backend:
        state = forks.run(number, backend=backend)
        assert state["choice"] in ("yes", "no")


@st.function
def forks(s: Any, number: int) -> None:
    s += f"Case {number}. "
    for fork in s.fork(3):
        fork += st.gen("text", max_tokens=4, temperature=0.5)
    s += st.select("choice", ["yes", "no"])


def left_stream(server: ServerProcess, http: httpx.Client, number: int) -> None:
    client = RawClient(server.url)
    body = {"prompt": f"Left {number}:", "max_tokens": 500, "ignore_eos": True, "stream": True}
    client.post(COMPLETIONS, body)
    client.read_until(b"data: ")
    list(WAYS_TO_GO.values())[number % len(WAYS_TO_GO)](client)
    client.close()


def refused(server: ServerProcess, http: httpx.Client, number: int) -> None:
    bodies: list[dict[str, Any]] = [
        {"temperature": -number - 1},
        {"regex": f"({number}"},
        {"json_schema": json.dumps({"type": f"nonsense {number}"})},
        {"model": f"another {number}"},
        {"stop_regex": f"[{number}"},
    ]
    answer = complete(http, "a", **bodies[number % len(bodies)])
    assert answer.status_code in (400, 404, 422), answer.text


KINDS = (plain, schema, recursive_schema, regex, ebnf, program, left_stream, refused)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A small pool, full after some requests."""
    with ServerProcess(tmp_path, "--max-total-tokens", "2048", "--speculate", "off") as server:
        server.wait_healthy()
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_requests_of_a_kind_leave_nothing(
    server: ServerProcess, kind: Callable[[ServerProcess, httpx.Client, int], None]
) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            uncounted, counted = [], []
            for sample in range(NUM_SAMPLES):
                numbers = range(sample * 100, (sample + 1) * 100)
                list(pool.map(lambda number: kind(server, http, number), numbers))
                cached_mb = grammars_mb(server)
                counted.append(cached_mb)
                uncounted.append(resident_mb(server) - cached_mb)
    growth = growth_of(uncounted[NUM_SAMPLES // 4 :])
    most = MOST_GROWTH_MB + 0.1 * growth_of(counted[NUM_SAMPLES // 4 :])
    assert growth < most, f"grew by {growth:.1f} MB, {most:.1f} allowed: {uncounted}"


def complete(http: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.7, "seed": 1, **fields}
    return http.post(COMPLETIONS, json=body)


def grammars_mb(server: ServerProcess) -> float:
    """What the engine says that its caches of grammars hold, once it is idle."""
    with st.Runtime(server.endpoint) as backend:
        wait_until(lambda: backend.get_server_info()["num_programs"] == 0)
        grammars = backend.get_server_info()["grammars"]
    return float(grammars["cached_bytes"] + grammars["mask_bytes"]) / 2**20


def resident_mb(server: ServerProcess) -> float:
    """Of all the server's processes."""
    return sum(map(rss_mb, process_tree(server.process.pid)))
