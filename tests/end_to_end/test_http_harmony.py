"""gpt-oss over HTTP: its experts in MXFP4, its channels, its calls, through a real client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_thread import engine_in_thread
from fastapi.testclient import TestClient
from harmony_model import TOKENS, make_harmony_model

import stemma as st
from stemma.frontend.dsl.expr import GenExpr
from stemma.frontend.protocol.constraint import constraint_of
from stemma.server.app import create_app

ASK: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
END = {str(TOKENS["<|end|>"]): 100}  # the random model ends its first message at once
CALLED = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_harmony_model(tmp_path_factory.mktemp("harmony") / "tiny-oss")


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    with engine_in_thread(folder, max_total_tokens=8192, num_threads=1) as engine:
        with TestClient(create_app(engine), base_url="http://localhost") as http:
            yield http


@pytest.fixture
def client(http: TestClient) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "tiny-oss", "messages": ASK, "temperature": 0, "max_tokens": 300, **fields}
    return client.chat.completions.create(**fields)


def scripted(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    """The model says just this."""
    more = {"regex": re.escape(text), **fields.pop("extra_body", {})}
    return ask(client, extra_body=more, max_tokens=400, **fields)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_streamed_and_not(client: openai.OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "logit_bias": END}
    whole = ask(client, **fields).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather" and set(json.loads(call.function.arguments)) == {"city"}
    assert whole.finish_reason == "tool_calls" and not whole.message.content
    chunks = [chunk.choices[0] for chunk in ask(client, **fields, stream=True)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert parts[0].function.name == "weather" and parts[0].id  # how many come is the load's
    assert "".join(part.function.arguments for part in parts) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


def test_a_call_and_its_result_go_around(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "logit_bias": END}
    message = ask(client, **fields).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    history = [*ASK, message.model_dump(exclude_none=True), result]
    second = ask(client, tools=[WEATHER], messages=history, max_tokens=8)
    assert second.choices[0].finish_reason in ("length", "stop")
    both = {**message.model_dump(exclude_none=True), "reasoning_content": "Hm.", "content": "So."}
    again = ask(client, tools=[WEATHER], messages=[*ASK, both, result], max_tokens=8)
    assert again.usage.prompt_tokens > second.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_channels_become_reasoning_and_content(client: openai.OpenAI, stream: bool) -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>Yes."
    reply = scripted(client, text, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in reply]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        message = reply.choices[0].message
        reasoning, content = message.reasoning_content, message.content
        details = reply.usage.completion_tokens_details
        assert details.reasoning_tokens == len("analysisHm.") + 3, "with its three marks"
        assert reply.usage.completion_tokens < len(text), "marks are tokens"
    assert (reasoning, content) == ("Hm.", "Yes.")


def test_reasoning_may_stay_in_the_content(client: openai.OpenAI) -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>Yes."
    message = scripted(client, text, extra_body={"separate_reasoning": False}).choices[0].message
    assert message.content == "Hm.Yes." and not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("token", ["<|call|>", "<|return|>"])
def test_the_formats_own_tokens_end_an_output(client: openai.OpenAI, token: str) -> None:
    reply = ask(client, logit_bias={str(TOKENS[token]): 100})
    assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens <= 1
    assert reply.choices[0].message.content == ""


def test_marks_that_a_grammar_forces_are_tokens(client: openai.OpenAI) -> None:
    reply = ask(client, tools=[WEATHER], tool_choice=NAMED, logit_bias=END, logprobs=True)
    written = [each.token for each in reply.choices[0].logprobs.content]
    assert "".join(written).startswith(f"<|end|><|start|>assistant{CALLED}{{")
    marks = [token for token in written if token in TOKENS]
    assert marks[:5] == ["<|end|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"]


def test_anthropics_api_tells_the_same_in_its_own_words(http: TestClient) -> None:
    """max_tokens cuts the random model before its call."""
    body = {
        "model": "tiny-oss",
        "max_tokens": 16,
        "messages": ASK,
        "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    reply = http.post("/v1/messages", json=body).json()
    assert reply["stop_reason"] == "max_tokens", reply


def test_documents_are_not_ranked_by_a_yes_that_never_comes_first(http: TestClient) -> None:
    reply = http.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert reply.status_code == 400 and "begin with a header" in reply.text


@st.tool
def weather(city: str) -> dict[str, str]:
    """Weather of a city."""
    return {"city": city, "sky": "rain"}


@st.function
def looks_it_up(s: st.ProgramState) -> Any:
    s += st.user("How is the weather in Ulm?")
    return st.tool_loop([weather])(s)


def test_a_programs_tool_loop_reads_channels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steered by a regex in each turn."""
    said = [f'{THOUGHT}{CALLED}{{"city":"Ulm"}}', f"{THOUGHT}<|channel|>final<|message|>It rains."]
    left, append = iter(said), st.ProgramState._append

    def steered(self: st.ProgramState, other: Any, source: str | None) -> None:
        if isinstance(other, GenExpr) and other.name == "answer":
            constraint = constraint_of(regex=re.escape(next(left)))
            other = GenExpr(other.name, replace(other.params, constraint=constraint))
        append(self, other, source)

    monkeypatch.setattr(st.ProgramState, "_append", steered)
    with engine_in_thread(folder, max_total_tokens=8192, num_threads=1) as engine:
        state = looks_it_up.run(backend=engine)
        assert state.ret_value == "It rains."
        result = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"'
        assert f'{result}{{"city":"Ulm","sky":"rain"}}"<|end|>' in state.text()
