"""Errors in the shape of the API that a client speaks, seen by OpenAI's and Anthropic's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from http_server import http_server

import stemma as st
from stemma.server.access.api_keys import new_key
from stemma.server.access.route_access import PROBES
from stemma.server.generation.service import Service

KEY = new_key()
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
LONG: list[Any] = [{"role": "user", "content": "word " * 9000}]
VERSION = {"anthropic-version": "2023-06-01"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"sunny": {"type": "boolean"}},
                       "required": ["sunny"]},
    },
}  # fmt: skip
DOCUMENT = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"const": "the document"}, "strict": True},
}


@pytest.fixture(scope="module")
def url(embedded: st.Engine) -> Iterator[str]:
    with http_server(embedded, api_key=(KEY,), max_body_mb=0.1) as address:
        yield address


@pytest.fixture(scope="module")
def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def gpt(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def send(url: str, method: str, path: str, **fields: Any) -> httpx.Response:
    headers = {"x-api-key": KEY, **fields.pop("headers", {})}
    return httpx.request(method, url + path, headers=headers, timeout=60, **fields)


def require_anthropic(reply: httpx.Response, status: int, kind: str) -> str:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    return str(body["error"]["message"])


def test_every_error_of_messages_has_anthropics_shape(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"model": "default", "max_tokens": 4, "messages": HELLO}
    cases = [
        (400, "invalid_request_error", "POST", "/v1/messages", {"json": {**body, "top_k": -7}}),
        (400, "invalid_request_error", "POST", "/v1/messages",
         {"json": {**body, "messages": LONG}}),
        (401, "authentication_error", "POST", "/v1/messages",
         {"json": body, "headers": {"x-api-key": "wrong"}}),
        (404, "not_found_error", "POST", "/v1/messages", {"json": {**body, "model": "claude-9"}}),
        (404, "not_found_error", "POST", "/v1/messages/nothing", {"json": body}),
        (405, "invalid_request_error", "GET", "/v1/messages", {}),
        (413, "request_too_large", "POST", "/v1/messages",
         {"json": {**body, "system": "x" * 200_000}}),
        (415, "invalid_request_error", "POST", "/v1/messages", {"content": b"{}"}),
        (404, "not_found_error", "GET", "/v1/models/claude-9", {"headers": VERSION}),
        (401, "authentication_error", "GET", "/v1/models",
         {"headers": {**VERSION, "x-api-key": "wrong"}}),
    ]  # fmt: skip
    for status, kind, method, path, fields in cases:
        assert require_anthropic(send(url, method, path, **fields), status, kind)

    def fail(*_: object) -> None:
        raise RuntimeError("a secret of the house")

    monkeypatch.setattr(Service, "served", fail)
    message = require_anthropic(send(url, "POST", "/v1/messages", json=body), 500, "api_error")
    assert "secret" not in message


def test_a_refusal_for_load_has_anthropics_shape(
    embedded: st.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "max_running", property(lambda service: 0))
    body = {"model": "default", "max_tokens": 4, "messages": HELLO}
    with http_server(embedded, max_queued_requests=0) as url:
        reply = send(url, "POST", "/v1/messages", json=body)
    require_anthropic(reply, 400, "invalid_request_error")  # no room for one, ever
    monkeypatch.undo()
    with http_server(embedded, api_keys=None) as url:
        monkeypatch.setattr("stemma.server.access.load.SharedLimit.num_missing", lambda *_: 1)
        reply = send(url, "POST", "/v1/messages", json=body)
        require_anthropic(reply, 429, "rate_limit_error")
        assert int(reply.headers["retry-after"]) >= 1


def test_an_overflow_of_the_context_is_recognised(
    gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens") as of:
        gpt.chat.completions.create(model="default", messages=LONG)
    assert of.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is \d+ tokens") as of:
        gpt.completions.create(model="default", prompt="word " * 9000)
    assert of.value.code == "context_length_exceeded"
    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: (at least )?\d+ tokens > \d+ maximum"
    ):
        claude.messages.create(model="default", max_tokens=4, messages=LONG)


def test_anthropics_client_lists_the_models(
    claude: anthropic.Anthropic, gpt: openai.OpenAI
) -> None:
    (model,) = claude.models.list().data
    assert model.type == "model" and model.display_name == model.id
    assert claude.models.retrieve(model.id).created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.models.retrieve("claude-9")
    assert [each.id for each in gpt.models.list()] == [model.id]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        gpt.models.retrieve("gpt-9")


def test_only_post_flushes_the_cache(url: str) -> None:
    reply = send(url, "GET", "/flush_cache")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert send(url, "POST", "/flush_cache").status_code == 200


@pytest.mark.parametrize("path", sorted(PROBES - {"/version"}))
def test_probes_answer_head(url: str, path: str) -> None:
    reply = httpx.head(url + path)
    assert (reply.status_code, reply.content) == (200, b"")


def test_the_models_answer_head(url: str) -> None:
    reply = send(url, "HEAD", "/v1/models")
    assert (reply.status_code, reply.content) == (200, b"")
    (model,) = send(url, "GET", "/v1/models").json()["data"]
    assert send(url, "HEAD", f"/v1/models/{model['id']}").status_code == 200
    assert send(url, "HEAD", "/v1/models/another").status_code == 404


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("num_messages", [1500, 2500], ids=str)
def test_a_chat_is_bounded_by_the_context_and_not_by_its_number_of_messages(
    url: str, path: str, num_messages: int
) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(num_messages)]
    prompt = "input" if path == "/v1/responses" else "messages"
    body = {prompt: [*messages, messages[0]], "max_tokens": 4}
    reply = send(url, "POST", path, json=body)
    assert reply.status_code == 400 and "prompt is too long" in reply.json()["error"]["message"]
    if num_messages == 1500:
        assert send(url, "POST", "/tokenize", json={"messages": messages}).status_code == 200


def test_a_body_that_is_missing_is_named(url: str) -> None:
    reply = send(url, "POST", "/v1/completions", headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"] == "the body is missing"


def test_all_methods_of_a_path_are_allowed(embedded: st.Engine, url: str) -> None:
    reply = send(url, "PUT", "/v1/responses/x")
    assert (reply.status_code, reply.headers["allow"]) == (405, "DELETE, GET")
    origin = "https://chat.example"
    with http_server(embedded, cors_origins=(origin,)) as address:
        headers = {"origin": origin, "access-control-request-method": "DELETE"}
        reply = send(address, "OPTIONS", "/v1/responses/x", headers=headers)
        assert reply.status_code == 200
        assert "DELETE" in reply.headers["access-control-allow-methods"]


def test_the_document_describes_both_kinds_of_errors(url: str) -> None:
    document = send(url, "GET", "/openapi.json").json()
    shapes = {}
    for path, method in (("/v1/messages", "post"), ("/v1/models", "get"), ("/generate", "post")):
        content = document["paths"][path][method]["responses"]["4XX"]["content"]
        shapes[path] = str(content["application/json"]["schema"])
    ours, theirs = "schemas/Error'", "schemas/AnthropicError'"
    assert theirs in shapes["/v1/messages"] and ours not in shapes["/v1/messages"]
    assert theirs in shapes["/v1/models"] and ours in shapes["/v1/models"]
    assert ours in shapes["/generate"] and theirs not in shapes["/generate"]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "weather"}}],
    ids=["required", "named"],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_call_that_must_come_comes_whatever_a_message_would_be(
    gpt: openai.OpenAI, choice: Any, is_streamed: bool
) -> None:
    fields: dict[str, Any] = {
        "model": "default", "messages": HELLO, "tools": [WEATHER], "tool_choice": choice,
        "response_format": DOCUMENT, "max_tokens": 60,
    }  # fmt: skip
    if is_streamed:
        with gpt.chat.completions.stream(**fields) as stream:
            answer = stream.get_final_completion()
    else:
        answer = gpt.chat.completions.create(**fields)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and "sunny" in call.function.arguments
    assert not answer.choices[0].message.content


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_else_the_document_comes_or_by_choice_a_call(gpt: openai.OpenAI, choice: Any) -> None:
    answer = gpt.chat.completions.create(
        model="default", messages=HELLO, tools=[WEATHER], tool_choice=choice,
        response_format=DOCUMENT, max_tokens=60,
    )  # fmt: skip
    message = answer.choices[0].message
    if choice == "auto" and message.tool_calls:  # in place of the document
        (call,) = message.tool_calls
        assert message.content is None and call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments), dict)
    else:
        assert message.content == '"the document"' and not message.tool_calls
