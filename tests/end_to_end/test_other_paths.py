"""What clients ask for under other paths: without /v1, the load, and the page of endpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_server import http_client
from waiting import wait_until

import stemma as st

MODEL = "stemma-tiny"
KEY = "a-key-of-this-test"
HELLO: list[Any] = [{"role": "user", "content": "Hi, my name is Nora."}]


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def test_openais_client_needs_no_v1(served: Any) -> None:
    client = openai.OpenAI(base_url=served.url, api_key="none", max_retries=0)
    assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL
    chat = client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0)
    assert "Nora" in (chat.choices[0].message.content or "")
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices
    assert client.embeddings.create(model=MODEL, input="x").data[0].embedding
    made = client.responses.create(model=MODEL, input="Hi, my name is Nora.", temperature=0)
    assert client.responses.retrieve(made.id).output_text == made.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_the_load_is_told_while_there_is_some(served: Any, http: httpx.Client) -> None:
    assert http.get("/load").json() == {"server_load": 0}
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "n": 2}
    hot = {"temperature": 3.0, "seed": 1}
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**body, **hot}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert http.get("/load").json() == {"server_load": 2}
        (engine,) = http.get("/get_load").json()
        assert engine["num_reqs"] == 2 and engine["num_waiting_reqs"] == 0
        assert engine["num_tokens"] > 2
        assert sum(slot["is_processing"] for slot in http.get("/slots").json()) == 2
    wait_until(lambda: http.get("/load").json() == {"server_load": 0})


def test_the_page_of_endpoints_runs_nothing_and_loads_nothing_from_elsewhere(
    http: httpx.Client,
) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "<script" not in page.text and "style=" not in page.text
    for address in re.findall(r'(?:href|src)="([^"]*)"', page.text):
        assert address.startswith("/") and http.get(address).status_code == 200, address
    document = http.get("/openapi.json").json()
    for path in document["paths"]:
        assert f" {path}</code></h2>" in page.text
    for path in ("/api/chat", "/completion", "/rerank", "/v1/chat/completions"):
        assert f"POST {path}<" in page.text
    assert "<code>repetition_penalty</code>" in page.text
    assert http.head("/docs").status_code == 200


def test_the_documents_errors_are_those_of_each_api(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]

    def error_of(path: str) -> str:
        told = paths[path]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
        return str(told["$ref"]).rpartition("/")[2]

    assert error_of("/api/chat") == "OllamaError" and error_of("/completion") == "Error"


def test_the_load_of_all_is_an_admins_and_the_page_anybodys(embedded: st.Engine) -> None:
    with http_client(embedded, api_key=(KEY,)) as client:
        assert client.get("/docs").status_code == 200
        assert client.get("/openapi.json").status_code == 401
        for path in ("/load", "/get_load", "/slots", "/props"):
            assert client.get(path).status_code == 401
            headers = {"authorization": f"Bearer {KEY}"}
            assert client.get(path, headers=headers).status_code == 200
