"""Over HTTP, too, no circumstance changes what a model says: streamed beside many others or waited
for alone, an answer has the same text, tokens and log probabilities.

The model is a random one over bytes in float32, so half characters and stop strings that begin
within a token are frequent.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

import stemma as st
from stemma.server.app import create_app

NAMES = ("tokens", "token_logprobs", "text_offset")


def random_body(rng: random.Random) -> dict[str, Any]:
    """Of a completion with log probabilities and ids."""
    body: dict[str, Any] = {
        "prompt": [rng.randrange(32, 127) for _ in range(rng.randint(1, 40))],
        "max_tokens": rng.randint(1, 32),
        "n": rng.randint(1, 3),
        "temperature": rng.choice((0, 0.7, 1.5)),
        "seed": rng.randrange(1000),
        "logprobs": rng.choice((None, 0, 2)),
        "return_token_ids": rng.random() < 0.7,
        "echo": rng.random() < 0.3,
        "include_stop_str_in_output": rng.random() < 0.3,
    }
    if rng.random() < 0.6:
        body["stop"] = [rng.choice("abcdefgh0123 \ufffd") for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.4:
        body["stop_regex"] = rng.choice(("[0-9]+[a-z]", "[A-F][^A-F]", "\\s\\S"))
    return body


async def whole_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return [
        {
            "text": choice["text"],
            "reason": choice["finish_reason"],
            "stop": choice.get("stop_reason"),
            "ids": choice.get("token_ids", []),
            **{name: (choice["logprobs"] or {}).get(name, []) for name in NAMES},
        }
        for choice in reply.json()["choices"]
    ]


async def streamed_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    lists = ("ids", *NAMES)
    told = [{"text": "", **{name: [] for name in lists}} for _ in range(body["n"])]
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        lines = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line]
    assert lines[-1] == "[DONE]", lines
    for line in lines[:-1]:
        (part,) = json.loads(line)["choices"]
        choice: dict[str, Any] = told[part["index"]]
        choice["text"] += part["text"]
        choice["ids"] += part.get("token_ids", [])
        choice["reason"], choice["stop"] = part["finish_reason"], part.get("stop_reason")
        for name in NAMES:
            choice[name] += (part["logprobs"] or {}).get(name, [])
    return told


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_is_the_same_streamed_among_many_and_waited_for_alone(
    seed: int, engine: st.Engine
) -> None:
    rng = random.Random(seed)
    bodies = [random_body(rng) for _ in range(16)]

    async def ask_all() -> tuple[list[Any], list[Any]]:
        transport = httpx.ASGITransport(create_app(engine))
        base = "http://127.0.0.1:8000"
        async with httpx.AsyncClient(transport=transport, base_url=base, timeout=60) as client:
            streamed = await asyncio.gather(*(streamed_answer(client, body) for body in bodies))
            return streamed, [await whole_answer(client, body) for body in bodies]

    for body, streamed, whole in zip(bodies, *asyncio.run(ask_all()), strict=True):
        for told, choice in zip(streamed, whole, strict=True):
            logprobs = choice.pop("token_logprobs")
            close = [
                None if value is None else pytest.approx(value, abs=1e-3) for value in logprobs
            ]
            assert told.pop("token_logprobs") == close, body
            assert told == choice, body
