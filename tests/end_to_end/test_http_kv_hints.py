"""KV hints over HTTP: an outcome for each action, and never another answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PROMPT = "Q: 2+2=\nA:"


@pytest.fixture
def http(served: Any) -> Any:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def action(kind: str, action_id: str = "a1", version: int = 1, **payload: Any) -> dict[str, Any]:
    return {
        "action_id": action_id,
        "action_type": kind,
        "action_version": version,
        "payload": payload,
    }


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": 1, "message_id": "m1", "actions": list(actions)}


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_request_keeps_its_own_prefix_and_its_answer_is_the_same(http: httpx.Client) -> None:
    plain = complete(http)
    hinted = complete(
        http, kv_hints=envelope(action("pin", ttl_ms=5000), action("retain", "a2", priority=80))
    )
    assert hinted["choices"][0]["text"] == plain["choices"][0]["text"]
    answer = hinted["kv_hints"]
    assert answer["message_id"] == "m1"
    assert [o["outcome"] for o in answer["outcomes"]] == ["accepted", "accepted"]
    assert [o["action_id"] for o in answer["outcomes"]] == ["a1", "a2"]
    assert all(o["num_tokens"] > 5 for o in answer["outcomes"])


def test_a_stream_answers_hints_in_a_chunk_of_its_own(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "stream": True,
        "kv_hints": envelope(action("retain")),
    }
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        data = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    answer = json.loads(data[-2])["kv_hints"]
    assert answer["outcomes"][0]["outcome"] == "accepted"


def test_targets_are_token_ids_a_prompt_or_a_response(http: httpx.Client) -> None:
    response = complete(http, return_token_ids=True)
    ids = [*response["choices"][0]["token_ids"]]
    reply = http.post(
        "/kv_hints",
        json=envelope(
            action("retain", "prompt", target={"prompt": PROMPT}),
            action("retain", "response", target={"response_id": response["id"]}),
            action("retain", "forgotten", target={"response_id": "cmpl-0"}),
            action("retain", "unknown", target={"token_ids": [255, 255, 255]}),
            action("pin", "bad", target={"token_ids": [-1]}),
        ),
    )
    outcomes = {o["action_id"]: o for o in reply.json()["outcomes"]}
    assert outcomes["prompt"]["outcome"] == "accepted"
    assert outcomes["response"]["num_tokens"] > outcomes["prompt"]["num_tokens"] and ids
    assert outcomes["forgotten"]["outcome"] == "missing"
    assert outcomes["unknown"]["outcome"] == "missing"
    assert outcomes["bad"]["outcome"] == "rejected"
    assert "token_ids" in outcomes["bad"]["reason"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (action("freeze"), "action_type 'freeze' is unknown"),
        (action("pin", version=2), "action_version 2 is unknown"),
        (action("pin", ttl_ms=0), "ttl_ms=0"),
        (action("retain", priority="high"), "priority='high'"),
        (action("demote", tier="tape"), "tier='tape'"),
        (action("pin", target=7), "target is no object"),
    ],
)
def test_what_is_unknown_is_rejected_in_its_outcome(
    http: httpx.Client, given: dict[str, Any], reason: str
) -> None:
    answer = complete(http, kv_hints=envelope(given))["kv_hints"]
    (outcome,) = answer["outcomes"]
    assert outcome["outcome"] == "rejected" and reason in outcome["reason"]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ('{"ttl_ms": 1000000000000000000000}', "64-bit"),
        (f'{{"x": {"[" * 400 + "]" * 400}}}', "cannot be encoded"),
        (f'{{"target": {{"prompt": "{"a" * 3_000_000}"}}}}', "bytes"),
    ],
)
def test_what_cannot_be_passed_on_is_rejected_and_loses_no_response(
    http: httpx.Client, payload: str, reason: str
) -> None:
    hints = f'{{"actions": [{{"action_id": "a", "action_type": "pin", "payload": {payload}}}]}}'
    body = f'{{"prompt": "Hello", "max_tokens": 2, "kv_hints": {hints}}}'
    headers = {"content-type": "application/json"}
    reply = http.post("/v1/completions", content=body, headers=headers)
    assert reply.status_code == 200 and len(reply.json()["choices"]) == 1
    (outcome,) = reply.json()["kv_hints"]["outcomes"]
    assert outcome["outcome"] == "rejected" and reason in outcome["reason"]


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        ({"actions": []}, "kv_hints.actions"),
        ({"actions": [{"action_type": "pin"}]}, "kv_hints.actions.0.action_id"),
        ({**envelope(action("pin")), "protocol_version": 9}, "kv_hints.protocol_version"),
        (envelope(action("pin"), action("pin")), "kv_hints.actions"),
        ("pin", "kv_hints"),
    ],
)
def test_a_malformed_envelope_is_refused_by_name(
    http: httpx.Client, hints: Any, field: str
) -> None:
    reply = http.post("/v1/completions", json={"prompt": PROMPT, "kv_hints": hints})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field


def test_outside_a_request_a_target_is_needed(http: httpx.Client) -> None:
    reply = http.post("/kv_hints", json=envelope(action("pin")))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "actions.0.payload.target"
