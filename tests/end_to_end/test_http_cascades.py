"""Cascades over HTTP: two models of one server that answer as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from model_servers import models_of, served
from server_process import COMPLETIONS, ServerProcess
from waiting import PATIENCE_S

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

NAME = "cascade:small,large"
CHAT_PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {
    "messages": [
        {
            "role": "user",
            "content": "Text: Ada Moor is 34 years old.\nExtract name, age as JSON.",
        }
    ],
    "temperature": 0,
    "max_tokens": 48,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": SCHEMA},
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[ServerProcess]:
    """A random small model and the embedded one, which must agree on every token."""
    folder = tmp_path_factory.mktemp("cascades")
    models = models_of(f"small={checkpoint}", f"large={EMBEDDED_MODEL}")
    flags = ("--cascade", "small,large", "--cascade-accept", "agree(0.9)")
    with served(folder, *models, *flags) as running:
        yield running


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def said(http: httpx.Client, path: str, model: str, **body: Any) -> str:
    reply = http.post(path, json={"model": model, **body})
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert told["model"] == model
    choice = told["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_a_cascade_answers_as_its_large_model_does(
    http: httpx.Client, server: ServerProcess
) -> None:
    text = {"prompt": "The weather in Lisbon", "temperature": 0, "max_tokens": 12}
    for path, body in [(CHAT_PATH, CHAT), (COMPLETIONS, text)]:
        assert said(http, path, NAME, **body) == said(http, path, "large", **body)
    told = http.get("/metrics").text
    assert f'stemma_cascade_escalated_total{{cascade="{NAME}",model="small"}} 2.0' in told
    assert f'stemma_cascade_answers_total{{cascade="{NAME}",model="large"}} 2.0' in told


def test_a_stream_has_the_same_text_in_several_pieces(http: httpx.Client) -> None:
    """Of a text that nobody has asked for, so that no draft has it at once."""
    question = {"role": "user", "content": "Text: Eve Lund is 57.\nExtract name, age as JSON."}
    chat = {**CHAT, "messages": [question]}
    pieces = []
    with http.stream("POST", CHAT_PATH, json={"model": NAME, "stream": True, **chat}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [c["delta"]["content"] for c in choices if c["delta"].get("content")]
    assert "".join(pieces) == said(http, CHAT_PATH, NAME, **chat) and len(pieces) > 1


def test_the_list_of_models_has_it_and_programs_may_name_its_models(
    http: httpx.Client, server: ServerProcess
) -> None:
    listed = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert listed[NAME]["models"] == ["small", "large"]
    assert http.get(f"/v1/models/{NAME}").json()["id"] == NAME
    said(http, CHAT_PATH, NAME, **CHAT)  # loads both

    @st.function
    def extract(s: st.ProgramState) -> None:
        s += st.user(CHAT["messages"][0]["content"])
        s += st.assistant(st.gen("x", json_schema=SCHEMA, temperature=0, max_tokens=48))

    with st.cascade("small", "large", accept=st.agree(0.9), base_url=server.url) as both:
        assert extract.run(backend=both)["x"] == said(http, CHAT_PATH, NAME, **CHAT)
        assert list(both.counts) == ["small", "large"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT_PATH, {**CHAT, "n": 2}, "n"),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, "prompt"),
        ("/tokenize", {"prompt": "Hi"}, "model"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    reply = http.post(path, json={"model": NAME, **body})
    assert reply.status_code == 400 and f"{field}=" in reply.text, reply.text
    assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {**CHAT, "n": 2}),
        (CHAT_PATH, {**CHAT, "logprobs": True}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
    ],
)
def test_what_is_refused_loads_no_model(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    for name in ("small", "large"):
        assert http.post("/models/unload", json={"model": name}).status_code == 200
    assert http.post(path, json={"model": NAME, **body}).status_code == 400
    listed = {each["id"]: each["status"]["value"] for each in http.get("/v1/models").json()["data"]}
    assert listed == {"small": "unloaded", "large": "unloaded", NAME: "unloaded"}


def test_a_wrong_name_is_told_of_the_cascades(http: httpx.Client) -> None:
    reply = http.post(CHAT_PATH, json={"model": "cascade:large,small", **CHAT})
    assert reply.status_code == 404 and f"'{NAME}'" in reply.text
    reply = http.post("/models/load", json={"model": NAME})
    assert reply.status_code == 400 and "a single model" in reply.text
