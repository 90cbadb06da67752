"""Ollama's API over HTTP, as its clients speak it, on the embedded model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from http_server import http_client
from waiting import wait_until

import stemma as st

MODEL = "stemma-tiny"
KEY = "a-key-of-this-test"
HELLO = {"messages": [{"role": "user", "content": "Hi, my name is Nora."}]}
EXTRACT = "Text: Ada Moor is 34 years old.\nExtract name, age as JSON."
GREEDY = {"options": {"temperature": 0, "num_predict": 40}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json={"model": MODEL, "stream": False, **GREEDY, **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def error_of(reply: httpx.Response, status: int = 400) -> str:
    assert reply.status_code == status, reply.text
    assert reply.json().keys() == {"error"}
    return str(reply.json()["error"])


def lines_of(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


# --- chats and completions ------------------------------------------------------------------------


def test_a_chat_streams_lines_unless_told_otherwise(http: httpx.Client) -> None:
    whole = ask(http, "/api/chat", **HELLO)
    lines = lines_of(http.post("/api/chat", json={"model": MODEL, **HELLO, **GREEDY}))
    said = "".join(line["message"]["content"] for line in lines)
    assert said == whole["message"]["content"] and "Nora" in said
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    last = lines[-1]
    assert last["done_reason"] == whole["done_reason"] == "stop"
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] > 5
    assert last["eval_count"] == whole["eval_count"] > 2
    parts = last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < parts <= last["total_duration"] and isinstance(last["total_duration"], int)
    assert datetime.fromisoformat(last["created_at"]).tzinfo is not None


def test_a_prompt_is_a_users_message_or_with_raw_the_text_itself(http: httpx.Client) -> None:
    templated = ask(http, "/api/generate", prompt="Hi, my name is Nora.")
    assert templated["response"] == ask(http, "/api/chat", **HELLO)["message"]["content"]
    lines = lines_of(
        http.post("/api/generate", json={"model": MODEL, "prompt": "Hi, my name is Nora."})
    )
    assert len(lines) > 1 and all("response" in line for line in lines)
    raw = ask(http, "/api/generate", prompt="Nora has a red", raw=True)
    completion = {"prompt": "Nora has a red", "temperature": 0, "max_tokens": 40}
    plain = http.post("/v1/completions", json=completion).json()["choices"][0]
    assert raw["response"] == plain["text"] and raw["done_reason"] == plain["finish_reason"]


def test_a_system_text_and_stop_strings_are_heeded(http: httpx.Client) -> None:
    system = ask(http, "/api/generate", prompt="Hi, my name is Nora.", system="Be nice.")
    plain = ask(http, "/api/generate", prompt="Hi, my name is Nora.")
    assert system["prompt_eval_count"] > plain["prompt_eval_count"]
    options = {"temperature": 0, "stop": ["Nora"]}
    stopped = ask(http, "/api/chat", **HELLO, options=options)["message"]["content"]
    assert stopped == plain["response"].partition("Nora")[0]
    short = ask(http, "/api/chat", **HELLO, options={"temperature": 0, "num_predict": 2})
    assert (short["eval_count"], short["done_reason"]) == (2, "length")


@pytest.mark.parametrize("form", ["json", PERSON])
def test_a_format_is_kept(http: httpx.Client, form: Any) -> None:
    chat = ask(http, "/api/chat", messages=[{"role": "user", "content": EXTRACT}], format=form)
    assert json.loads(chat["message"]["content"]) == {"name": "Ada Moor", "age": 34}
    completion = ask(http, "/api/generate", prompt=EXTRACT, format=form)
    assert json.loads(completion["response"]) == {"name": "Ada Moor", "age": 34}


def test_a_call_and_its_result_are_messages_of_a_chat(http: httpx.Client) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Weather in Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "sunny"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    answer = ask(http, "/api/chat", messages=messages, tools=[tool])
    assert answer["message"]["role"] == "assistant" and answer["done"]


def test_log_probabilities_come_with_their_text(http: httpx.Client) -> None:
    asked = {**HELLO, **GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = ask(http, "/api/chat", **asked)["logprobs"]
    lines = lines_of(http.post("/api/chat", json=asked))
    streamed = [entry for line in lines for entry in line.get("logprobs", ())]
    assert [e["token"] for e in streamed] == [e["token"] for e in whole] and len(whole) > 2
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "keep_alive": 0}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ],
)
def test_nothing_to_say_asks_for_the_model_to_be_there(
    http: httpx.Client, path: str, body: dict[str, Any], said: dict[str, Any]
) -> None:
    answer = ask(http, path, **body)
    assert answer.items() >= {**said, "done": True, "done_reason": "load"}.items()
    error_of(http.post(path, json={"model": "llama3", **body}), 404)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_client_that_leaves_a_stream_stops_its_decoding(served: Any, path: str) -> None:
    options = {"temperature": 100.0, "seed": 1, "num_predict": 1500}  # any token but an end
    prompt = HELLO if path == "/api/chat" else {"prompt": "x", "raw": True}
    with st.Runtime(served.endpoint) as runtime:
        with httpx.stream("POST", served.url + path, json={**prompt, "options": options}) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert runtime.get_server_info()["num_running"] == 1
        wait_until(lambda: not runtime.get_server_info()["num_running"])


# --- errors and access ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]},
            "messages.0.images='1 of them'",
        ),
        ({**HELLO, "options": {"mirostat": 2}}, "mirostat"),
        ({**HELLO, "options": {"temperature": "hot"}}, "options.temperature"),
        ({**HELLO, "think": True}, "does not support thinking"),
        ({**HELLO, "format": "yaml"}, "format"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, "maximum context length"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "role"),
    ],
)
def test_an_error_is_a_text_that_names_what_is_wrong(
    http: httpx.Client, body: dict[str, Any], told: str
) -> None:
    assert told in error_of(http.post("/api/chat", json=body))


def test_another_model_is_a_404_and_latest_is_the_model(http: httpx.Client) -> None:
    assert "llama3" in error_of(http.post("/api/chat", json={"model": "llama3", **HELLO}), 404)
    assert ask(http, "/api/chat", **HELLO)["model"] == MODEL
    latest = http.post("/api/chat", json={"model": f"{MODEL}:latest", "stream": False, **HELLO})
    assert latest.json()["model"] == f"{MODEL}:latest"
    error_of(http.get("/api/nothing"), 404)


def test_no_tokens_to_fill_in_text_are_told_with_the_field(http: httpx.Client) -> None:
    told = error_of(http.post("/api/generate", json={"prompt": "a", "suffix": "b"}))
    assert told.startswith("suffix: ")


def test_a_body_without_a_type_is_taken_unless_a_page_sends_it(http: httpx.Client) -> None:
    body = json.dumps({**HELLO, "stream": False}).encode()
    types: list[dict[str, str]] = [{}, {"content-type": "application/x-www-form-urlencoded"}]
    for headers in types:
        assert http.post("/api/chat", content=body, headers=headers).status_code == 200
        own = {**headers, "origin": str(http.base_url).rstrip("/")}
        error_of(http.post("/api/chat", content=body, headers=own), 415)
    error_of(http.post("/api/chat", content=body, headers={"content-type": "text/plain"}), 415)


def test_a_key_is_needed_where_others_need_it(embedded: st.Engine) -> None:
    with http_client(embedded, api_key=(KEY,)) as client:
        assert "API key" in error_of(client.post("/api/chat", json=HELLO), 401)
        assert "API key" in error_of(client.get("/api/tags"), 401)
        headers = {"authorization": f"Bearer {KEY}"}
        assert client.get("/api/tags", headers=headers).status_code == 200


# --- models and embeddings ------------------------------------------------------------------------


def test_the_model_is_listed_and_shown(http: httpx.Client) -> None:
    (listed,) = http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == f"{MODEL}:latest" and listed["size"] > 10**6
    assert len(listed["digest"]) == 64 and listed["details"]["family"] == "llama"
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] == 2048 and running["digest"] == listed["digest"]
    for name in ({"model": listed["name"]}, {"name": MODEL}):
        shown = http.post("/api/show", json=name).json()
        assert "message['role']" in shown["template"]
        assert shown["model_info"]["llama.context_length"] == 2048
        assert shown["capabilities"] == ["completion", "tools"]
    error_of(http.post("/api/show", json={"model": "llama3"}), 404)
    assert http.get("/api/version").json()["version"][0].isdecimal()


def test_embeddings_are_those_of_the_other_apis(http: httpx.Client) -> None:
    texts = ["a red kite", "a blue boat"]
    told = http.post("/api/embed", json={"model": MODEL, "input": texts}).json()
    data = http.post("/v1/embeddings", json={"input": texts}).json()["data"]
    for found, item in zip(told["embeddings"], data, strict=True):
        assert found == pytest.approx(item["embedding"], abs=1e-4)
    assert told["prompt_eval_count"] > 4
    (short,) = http.post("/api/embed", json={"input": "a", "dimensions": 8}).json()["embeddings"]
    assert len(short) == 8 and math.hypot(*short) == pytest.approx(1, abs=1e-4)
    assert http.post("/api/embed", json={"input": []}).json()["embeddings"] == []
    old = http.post("/api/embeddings", json={"prompt": "a red kite"}).json()["embedding"]
    unit = [value / math.hypot(*old) for value in old]
    assert unit == pytest.approx(told["embeddings"][0], abs=1e-3)
