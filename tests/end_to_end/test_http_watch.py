"""`/watch` over HTTP: what it says is what the engine says elsewhere."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx

import stemma as st


def events_of(url: str, num_events: int) -> list[tuple[str, dict[str, Any]]]:
    with httpx.stream("GET", f"{url}/watch", params={"events": num_events}, timeout=120) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        reply.read()
    blocks = reply.text.strip().split("\n\n")
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in (block.split("\n") for block in blocks)
    ]


def test_the_feed_agrees_with_the_engine_and_shows_the_steps_of_a_request(served: Any) -> None:
    with httpx.stream("GET", f"{served.url}/watch", timeout=120) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: state"
        prompt = "The stemma of a text is the tree of its copies."
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120).json()
        names: dict[str, Any] = {}
        steps: list[dict[str, Any]] = []
        texts: dict[str, str] = {}
        deadline = time.monotonic() + 120
        for line in lines:
            assert time.monotonic() < deadline, "the request was never shown"
            if not line.startswith("data: "):
                continue
            told = json.loads(line.removeprefix("data: "))
            names |= told["steps"]["names"]
            steps += told["steps"]["items"]
            texts |= told["tree"]["texts"]
            queue = told["queue"]
            is_shown = any("a text is the tree" in text for text in texts.values())
            if steps and is_shown and not queue["num_running"]:
                break
    num_tokens = answer["usage"]["completion_tokens"]
    assert sum(step["tokens"]["decode"] for step in steps) >= num_tokens - 2
    assert any(name["program"] for name in names.values())
    with st.Runtime(served.endpoint) as backend:
        info = backend.get_server_info()
    (kind, told), *_ = events_of(served.url, 1)
    assert kind == "state" and told["is_whole"] and told["model"] == info["model"]
    for name in ("total_tokens", "free_tokens", "cached_tokens", "evictable_tokens"):
        assert told["engine"][name] == info[name]
    shown = sum(row[4] for row in told["tree"]["nodes"] if row[0] > 0)
    assert shown == info["cached_tokens"]
    assert sum(count for _, count in told["pool"]["cells"]) > 0


def test_the_number_of_events_is_checked(served: Any) -> None:
    assert httpx.get(f"{served.url}/watch", params={"events": 0}).status_code == 400
