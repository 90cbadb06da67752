"""`/v1/messages` through Anthropic's own client, on the embedded model."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from stemma.errors import InvalidRequest
from stemma.server.api.anthropic.reply import MessagesReply
from stemma.server.api.anthropic.schema import MessagesRequest
from stemma.server.protocol.pieces import Outcome, Piece

MODEL = "stemma-tiny"
RECALL: list[Any] = [
    {"role": "user", "content": "Hi, my name is Nora."},
    {"role": "assistant", "content": [{"type": "text", "text": "Nice to meet you, Nora!"}]},
    {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(served: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_a_chat_is_answered_and_its_prefix_is_cached(client: anthropic.Anthropic) -> None:
    first, again = (
        client.messages.create(model=MODEL, max_tokens=24, messages=RECALL) for _ in range(2)
    )
    assert "Nora" in first.content[0].text  # type: ignore[union-attr]
    assert first.stop_reason == "end_turn" and first.role == "assistant"
    assert first.usage.output_tokens > 0
    cached = again.usage.cache_read_input_tokens
    assert cached and cached >= 10
    total = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert again.usage.input_tokens + cached == total


def test_a_stream_builds_the_same_message(client: anthropic.Anthropic) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "max_tokens": 24, "messages": RECALL, "system": "Be brief.",
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        built = stream.get_final_message()
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert built.content[0].text == text  # type: ignore[union-attr]
    assert built.stop_reason == whole.stop_reason
    assert built.usage.output_tokens == whole.usage.output_tokens
    sums = [u.input_tokens + (u.cache_read_input_tokens or 0) for u in (built.usage, whole.usage)]
    assert sums[0] == sums[1] > 0


def test_tokens_are_counted_as_they_will_be(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=RECALL, system="Be brief.")
    made = client.messages.create(model=MODEL, max_tokens=1, messages=RECALL, system="Be brief.")
    used = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model=MODEL, max_tokens=1, messages=RECALL)
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model=MODEL, max_tokens=24, messages=RECALL, stop_sequences=["Nora"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Nora")


def test_a_forced_tool_is_called_whole_and_streamed(client: anthropic.Anthropic) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "max_tokens": 40, "tools": [WEATHER],
        "messages": [{"role": "user", "content": "Weather in Rome?"}],
        "tool_choice": {"type": "tool", "name": "weather"}, "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = client.messages.create(**request)
    call = whole.content[-1]
    assert call.type == "tool_use" and call.name == "weather"
    assert call.input["city"] in ("Oslo", "Rome")
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**request) as stream:
        built = stream.get_final_message()
    assert built.content[-1].input == call.input  # type: ignore[union-attr]


def test_a_schema_is_kept(client: anthropic.Anthropic) -> None:
    schema = WEATHER["input_schema"]
    message = client.messages.create(
        model=MODEL, max_tokens=40, messages=RECALL,
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )  # fmt: skip
    assert json.loads(message.content[0].text)["city"] in ("Oslo", "Rome")  # type: ignore[union-attr]


def test_a_tool_results_turn_is_rendered(client: anthropic.Anthropic) -> None:
    history = [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
            {"type": "text", "text": "So?"},
        ]},
    ]  # fmt: skip
    message = client.messages.create(
        model=MODEL,
        max_tokens=8,
        messages=history,
        tools=[WEATHER],  # type: ignore[arg-type]
    )
    assert message.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages",
        ),
        ({"temperature": -1}, "temperature"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: "),
        (
            {"tools": [{"name": "f", "input_schema": {"city": "Ulm"}}]},
            "tools.0.input_schema: input_schema={'city': 'Ulm'} is not allowed; ",
        ),
        ({"stop_sequences": ["a", ""]}, "stop_sequences.1: "),
    ],
)
def test_errors_are_anthropics_and_name_the_field(served: Any, change: Any, field: str) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": RECALL, **change}
    reply = httpx.post(f"{served.url}/v1/messages", json=body)
    assert reply.status_code == 400
    said = reply.json()
    assert said["type"] == "error" and said["error"]["type"] == "invalid_request_error"
    assert field in said["error"]["message"]


def test_another_models_name_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude-x", max_tokens=4, messages=RECALL)


class Scripted:
    """A reader that says its deltas one for each text that it is fed."""

    def __init__(self, *deltas: dict[str, Any]) -> None:
        self._deltas = list(deltas)

    def feed(self, text: str) -> list[dict[str, Any]]:
        return [self._deltas.pop(0)]

    def finish(self, outcome: Outcome) -> tuple[list[dict[str, Any]], str]:
        return [], "tool_calls"

    def message(self, outcome: Outcome) -> tuple[dict[str, Any], str]:
        raise NotImplementedError

    def num_reasoning_tokens(self, outcome: Outcome) -> int:
        return 0


def test_blocks_open_and_close_in_order() -> None:
    call = {"index": 0, "id": "c1", "type": "function"}
    deltas = [
        {"reasoning_content": "Hm"}, {"reasoning_content": "m"}, {"content": "Yes"},
        {"tool_calls": [{**call, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"tool_calls": [{**call, "id": "c2", "function": {"name": "g", "arguments": "{}"}}]},
    ]  # fmt: skip
    reply = MessagesReply("m", Scripted(*deltas), max_model_len=100)
    meta = {"prompt_tokens": 3, "cached_tokens": 1, "completion_tokens": 9, "finish_reason": "stop"}
    stream = b"".join(reply.piece(Piece(0, "x")) for _ in deltas)
    stream += reply.end(Outcome(0, "", meta)) + reply.close([], None)
    events = [json.loads(line[6:]) for line in stream.decode().splitlines() if line[:5] == "data:"]
    shape = [
        (event["type"].removeprefix("content_block_"), event.get("index"))
        for event in events
        if event["type"].startswith("content_block_")
    ]
    assert shape == [
        ("start", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("delta", 2), ("stop", 2),
        ("start", 3), ("delta", 3), ("stop", 3),
    ]  # fmt: skip
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    assert events[-2]["usage"] == {
        "input_tokens": 2, "cache_read_input_tokens": 1, "cache_creation_input_tokens": 0,
        "output_tokens": 9,
    }  # fmt: skip
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_tool_choice_without_its_name_is_refused() -> None:
    body = {
        "max_tokens": 4,
        "messages": RECALL,
        "tools": [WEATHER],
        "tool_choice": {"type": "tool"},
    }
    with pytest.raises(InvalidRequest, match=r"tool_choice\.name"):
        MessagesRequest.model_validate(body).chat()
