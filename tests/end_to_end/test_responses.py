"""`/v1/responses` through OpenAI's client, on the embedded model; and the store beside it."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, Field

from stemma.errors import InvalidRequest
from stemma.server.api.responses.items import Events, OutputItems
from stemma.server.api.responses.schema import ResponsesRequest
from stemma.server.generation import response_store as store_module
from stemma.server.generation.response_store import ResponseStore

MODEL = "stemma-tiny"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_a_conversation_goes_on_from_what_the_server_keeps(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model=MODEL, input="Hi, my name is Nora.", max_output_tokens=24, temperature=0
    )
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, temperature=0,
        max_output_tokens=24,
    )  # fmt: skip
    assert "Nora" in second.output_text
    assert second.previous_response_id == first.id
    assert second.usage is not None and second.usage.input_tokens_details.cached_tokens >= 10
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=MODEL, input="So?", previous_response_id=first.id)
    third = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=second.id, max_output_tokens=8
    )
    assert third.status in ("completed", "incomplete")


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_stream_builds_the_same_response(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "input": "Hi, my name is Nora.", "temperature": 0, "max_output_tokens": 24,
        "instructions": "Be brief.",
    }  # fmt: skip
    whole = client.responses.create(**request)
    with client.responses.stream(**request) as stream:
        events = list(stream)
        built = stream.get_final_response()
    assert built.output_text == whole.output_text
    text = "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent))
    assert text == whole.output_text
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert sorted(set(numbers)) == list(range(len(set(numbers))))
    assert built.usage is not None and whole.usage is not None
    assert built.usage.total_tokens == whole.usage.total_tokens


def test_a_cut_response_says_so(client: openai.OpenAI) -> None:
    cut = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=1, extra_body={"ignore_eos": True}
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    made = client.responses.parse(
        model=MODEL, input="Three days in Rome.", text_format=City, max_output_tokens=60
    )
    assert isinstance(made.output_parsed, City)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "input": "Weather in Rome?", "tools": [WEATHER], "tool_choice": choice,
        "temperature": 0, "max_output_tokens": 60,
    }  # fmt: skip
    whole = client.responses.create(**request)
    call = whole.output[-1]
    assert call.type == "function_call" and call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    with client.responses.stream(**request) as stream:
        built = stream.get_final_response()
    assert built.output[-1].arguments == call.arguments  # type: ignore[union-attr]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    after = client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=whole.id,
        max_output_tokens=8,  # type: ignore[list-item]
    )
    assert after.usage is not None and after.usage.output_tokens > 0


def test_logprobs_come_where_they_are_included(client: openai.OpenAI) -> None:
    made = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=3, include=["message.output_text.logprobs"],
        top_logprobs=2, extra_body={"ignore_eos": True},
    )  # fmt: skip
    logprobs = made.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert logprobs and all(len(entry.top_logprobs) == 2 for entry in logprobs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(served: Any, change: Any, field: str) -> None:
    reply = httpx.post(f"{served.url}/v1/responses", json={"input": "Hi", **change})
    assert reply.status_code == 400 and field in reply.json()["error"]["message"]


def test_items_of_one_turn_make_one_message() -> None:
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    messages = ResponsesRequest.model_validate({"input": items}).messages()
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    turn = messages[1]
    assert turn["content"] == "I look." and turn["reasoning_content"] == "Hm"
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]


def test_a_response_that_was_cut_while_reasoning_may_be_sent_back(client: openai.OpenAI) -> None:
    thought: Any = {"type": "reasoning_text", "text": "Hm"}
    cut: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]}
    said: list[Any] = [{"role": "user", "content": "Hi"}, cut, {"role": "user", "content": "Well?"}]
    reply = client.responses.create(model="default", input=said, max_output_tokens=16)
    assert reply.status in ("completed", "incomplete")


def test_hosted_parts_are_refused_before_anything_else() -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        ResponsesRequest.model_validate({"input": "x", "prompt": {"id": "p"}}).chat([])


def test_an_item_ends_before_the_next_begins() -> None:
    items = OutputItems(Events())
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
    said = items.say({"reasoning_content": "Hm"}) + items.say({"content": "Yes"})
    said += items.say({"tool_calls": [call]}) + items.close()
    events = [json.loads(line[6:]) for line in said.decode().splitlines() if line[:5] == "data:"]
    marks = [
        (event["type"].rpartition(".")[2], event["output_index"])
        for event in events
        if "output_item" in event["type"]
    ]
    assert marks == [
        ("added", 0), ("done", 0), ("added", 1), ("done", 1), ("added", 2), ("done", 2),
    ]  # fmt: skip
    assert [item["type"] for item in items.items] == ["reasoning", "message", "function_call"]


# --- the store ---------------------------------------------------------------------------------


def body(number: int) -> dict[str, Any]:
    return {"id": f"resp_{number}"}


def test_a_response_is_forgotten_when_its_time_is_over() -> None:
    now = [0.0]
    store = ResponseStore(10.0, clock=lambda: now[0])
    store.put("me", body(1), [], [])
    now[0] = 9.0
    assert store.get("me", "resp_1") is not None
    now[0] = 11.0
    assert store.get("me", "resp_1") is None
    assert store.num_bytes == 0 and len(store) == 0


def test_anothers_response_is_not_there() -> None:
    store = ResponseStore(10.0)
    store.put("me", body(1), [], [])
    assert store.get("you", "resp_1") is None
    assert not store.remove("you", "resp_1") and store.remove("me", "resp_1")


@pytest.mark.parametrize("limit", ["MAX_RESPONSES", "MAX_BYTES"])
def test_who_stores_much_drops_its_own_responses_and_not_anothers(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(store_module, limit, {"MAX_RESPONSES": 8, "MAX_BYTES": 2000}[limit])
    store = ResponseStore(10.0)
    for number in range(2):
        store.put("beside", body(number), [], [])
    for number in range(2, 100):
        store.put("flood", body(number), [], [])
    assert store.get("beside", "resp_0") is not None and store.get("beside", "resp_1") is not None
    assert store.get("flood", "resp_99") is not None and store.get("flood", "resp_2") is None
    assert store.remove("beside", "resp_0") and store.remove("beside", "resp_1")
    assert store.get("beside", "resp_1") is None


def test_number_and_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 3)
    monkeypatch.setattr(store_module, "MAX_BYTES", 2000)
    store = ResponseStore(10.0)
    for number in range(5):
        store.put("me", body(number), [], [])
    assert [store.get("me", f"resp_{i}") is not None for i in range(5)] == [False] * 2 + [True] * 3
    store.put("me", body(5), [], [{"content": "x" * 1960}])
    assert len(store) == 1 and store.num_bytes <= 2000
    store.put("me", body(6), [], [{"content": "x" * 3000}])
    assert store.get("me", "resp_6") is None and store.get("me", "resp_5") is not None
