"""Several models behind one address: which of them answers, with real processes and clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoints import make_checkpoint
from model_servers import (
    CHAT,
    KEY,
    TINY,
    models_of,
    served,
)
from server_process import COMPLETIONS, ServerProcess
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.server.access.api_keys import file_entry


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, of a shorter context."""
    return make_checkpoint(tmp_path_factory.mktemp("other"), max_position_embeddings=512, seed=3)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, other: Path) -> Iterator[ServerProcess]:
    """Two models with room for both, after each was asked once; tests here unload none."""
    folder = tmp_path_factory.mktemp("both")
    with served(folder, *models_of(TINY, f"other={other}"), "--api-key", KEY) as server:
        keyed = {"authorization": f"Bearer {KEY}"}
        for name in ("tiny", "other"):
            reply = httpx.post(
                server.url + COMPLETIONS,
                json={"prompt": "Hi", "max_tokens": 2, "model": name},
                headers=keyed,
                timeout=PATIENCE_S,
            )
            assert reply.status_code == 200, reply.text
        yield server


@pytest.fixture
def http(both: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=both.url, headers=headers, timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body", "name_at"),
    [
        ("/v1/chat/completions", CHAT, "model"),
        ("/chat/completions", CHAT, "model"),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, "model"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}, "model"),
        ("/v1/embeddings", {"input": "Hi"}, "model"),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}, "model"),
        ("/api/chat", {"messages": CHAT["messages"], "stream": False}, "model"),
        ("/api/embed", {"input": "Hi"}, "model"),
        ("/v1/rerank", {"query": "Hi", "documents": ["a", "b"]}, "model"),
    ],
)
def test_every_api_chooses_by_the_bodys_model(
    http: httpx.Client, path: str, body: dict[str, Any], name_at: str
) -> None:
    options = {"options": {"num_predict": 2}} if path == "/api/chat" else {}
    for name in ("tiny", "other"):
        reply = http.post(path, json={**body, **options, "model": name})
        assert reply.status_code == 200, reply.text
        assert reply.json()[name_at].removesuffix(":latest") == name
        assert "x-stemma-warnings" not in reply.headers


def test_our_own_endpoints_choose_by_it_too(http: httpx.Client) -> None:
    def ids(**fields: object) -> list[int]:
        reply = http.post("/tokenize", json={"text": "Hello there", **fields})
        assert reply.status_code == 200 and "x-stemma-warnings" not in reply.headers, reply.text
        return list(reply.json()["tokens"])

    assert ids() == ids(model="tiny") != ids(model="other")
    asked = {"text": "Hi", "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    texts = [http.post("/generate", json={**asked, "model": m}) for m in ("tiny", "other")]
    assert texts[0].json()["text"] != texts[1].json()["text"]
    refused = http.post("/generate", json={**asked, "model": 5})
    assert refused.status_code == 400 and "'tiny', 'other'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", [None, "", "default", "tiny", "tiny:latest"])
def test_no_name_means_the_first_model(http: httpx.Client, name: str | None) -> None:
    path = "/api/chat" if name == "tiny:latest" else "/v1/chat/completions"
    reply = http.post(path, json={**CHAT, "model": name, "stream": False})
    if name == "tiny:latest":
        reply = http.post(path, json={"model": name, "stream": False, "messages": CHAT["messages"]})
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"].removesuffix(":latest") == "tiny"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    ],
)
def test_a_tag_may_follow_the_name_on_every_api(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    reply = http.post(path, json={**body, "model": "other:latest"})
    assert reply.status_code == 200 and reply.json()["model"] == "other", reply.text


@pytest.mark.parametrize("name", ["nope", "tiny:adapter", "TINY", "x" * 100_000, "tiny "])
def test_an_unknown_name_is_a_404_that_lists_the_models(http: httpx.Client, name: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "Hi"}), ("/generate", {"text": "Hi"})):
        reply = http.post(path, json={**body, "model": name})
        error = reply.json()["error"]
        assert reply.status_code == 404 and error["code"] == "model_not_found", reply.text
        assert "there are 'tiny', 'other'" in error["message"] and len(error["message"]) < 400
    asked = http.get("/model_info", params={"model": name[:4000]})
    assert asked.status_code == 404


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"model": 5, "prompt": "Hi"}', 400),
        (b'{"model": ["tiny"], "prompt": "Hi"}', 400),
        (b'{"model": {"tiny": 1}, "prompt": "Hi"}', 400),
        (b'{"model": "tiny", "model": "other", "prompt": "Hi"}', 400),
        (b'["tiny"]', 400),
        (b'"tiny"', 400),
        (b"null", 400),
        (b"", 400),
        (b'{"model": "tiny"', 400),
        (b"\xff\xfe", 400),
        (b'{"model": "\\ud800"}', 400),
        (b"[" * 100_000, 400),
        (b'{"model": "other", "prompt": "' + b"a" * 5_000_000 + b'"}', 413),
    ],
)
def test_a_bad_body_is_refused_as_by_a_server_of_one_model(
    http: httpx.Client, content: bytes, status: int
) -> None:
    json_type = {"content-type": "application/json"}
    reply = http.post(COMPLETIONS, content=content, headers=json_type)
    assert reply.status_code == status, reply.text
    assert http.post(COMPLETIONS, content=content[:9000]).status_code == 415
    assert http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 1}).status_code == 200


def test_what_only_asks_names_a_model_in_the_address(http: httpx.Client) -> None:
    assert http.get("/model_info").json()["served_model_name"] == "tiny"
    assert http.get("/model_info?model=other").json()["served_model_name"] == "other"
    assert http.get("/server_info?model=other").json()["max_model_len"] == 512
    assert http.post("/flush_cache?model=other").status_code == 200
    assert http.get("/docs").status_code == http.get("/").status_code == 200
    assert "/v1/chat/completions" in http.get("/openapi.json").json()["paths"]


def test_lists_name_all_models_what_is_loaded_and_where_programs_connect(
    both: ServerProcess, http: httpx.Client
) -> None:
    first, second = http.get("/v1/models").json()["data"]
    assert (first["id"], first["max_model_len"]) == ("tiny", 2048)
    assert (second["id"], second["max_model_len"]) == ("other", 512)
    assert first["status"] == second["status"] == {"value": "loaded"}
    assert first["endpoint"] == both.endpoint and second["endpoint"] != both.endpoint
    assert http.get("/v1/models/other").json() == second
    assert http.get("/v1/models/nope").status_code == 404
    spoken = {"anthropic-version": "2023-06-01"}
    assert [m["id"] for m in http.get("/v1/models", headers=spoken).json()["data"]] == [
        "tiny",
        "other",
    ]
    for path in ("/api/tags", "/api/ps"):
        told = http.get(path).json()["models"]
        assert [model["name"] for model in told] == ["tiny:latest", "other:latest"], told
        assert all(model["size"] > 0 for model in told)
    for name, length in (("tiny", 2048), ("other:latest", 512)):
        shown = http.post("/api/show", json={"model": name}).json()
        assert shown["model_info"]["llama.context_length"] == length


def test_a_program_reaches_each_model_at_its_endpoint(
    both: ServerProcess, http: httpx.Client
) -> None:
    for model in http.get("/v1/models").json()["data"]:
        with st.Runtime(model["endpoint"]) as runtime:
            assert runtime.get_server_info()["model"] == model["id"]
        assert model["endpoint"] in both.log


def test_a_response_is_continued_by_another_model_and_a_request_aborted_on_any(
    http: httpx.Client,
) -> None:
    asked = {"input": "Hi", "max_output_tokens": 16}
    first = http.post("/v1/responses", json={**asked, "model": "tiny"}).json()
    more = {**asked, "model": "other", "previous_response_id": first["id"]}
    assert http.post("/v1/responses", json=more).json()["model"] == "other"
    assert http.get(f"/v1/responses/{first['id']}").json()["model"] == "tiny"
    body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "model": "other"}
    with http.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        lines = stream.iter_lines()
        first_event = json.loads(next(lines).removeprefix("data: "))
        aborted = http.post("/abort", json={"id": first_event["id"]}).json()["aborted"]
        assert aborted == 1 or any("length" in line for line in lines)


def test_the_log_tells_which_model_was_chosen(both: ServerProcess, http: httpx.Client) -> None:
    def line_of(reply: httpx.Response) -> str:
        reply.raise_for_status()
        told = re.compile(f".* request_id={reply.headers['x-request-id']} .*\n")
        wait_until(lambda: told.search(both.log) is not None)  # it is written behind the answer
        return told.findall(both.log)[0]

    for name, model in (("other", "other"), ("default", "tiny"), ("tiny:latest", "tiny")):
        body = {"prompt": "Hi", "max_tokens": 2, "model": name}
        assert f" model={model} " in line_of(http.post(COMPLETIONS, json=body))
    assert " model=other" in line_of(http.get("/server_info", params={"model": "other"}))
    assert " model=" not in line_of(http.get("/v1/models"))


def test_metrics_have_each_models_figures(both: ServerProcess, http: httpx.Client) -> None:
    text = http.get("/metrics").text
    for name in ("tiny", "other"):
        for line in (
            f'stemma_engine_up{{model="{name}"}} 1.0',
            f'stemma_model_loaded{{model="{name}"}} 1.0',
            f'stemma_model_loads_total{{model="{name}"}} 1.0',
        ):
            assert line in text
        assert f'stemma_generated_tokens_total{{model="{name}"}}' in text
    assert text.count("# TYPE stemma_generated_tokens_total counter") == 1
    assert 'route="/v1/completions"' in text


def test_keys_are_needed_for_all_but_the_probes(both: ServerProcess) -> None:
    ask = {"prompt": "Hi", "max_tokens": 1, "model": "other"}
    assert httpx.post(both.url + COMPLETIONS, json=ask, timeout=PATIENCE_S).status_code == 401
    for path in ("/v1/models", "/api/tags", "/api/ps", "/metrics", "/tree?model=other"):
        assert both.status(path) == 401
    for path in ("/health", "/ready", "/live", "/version"):
        assert both.status(path) == 200


def test_a_keys_limits_hold_over_all_models(tmp_path: Path, other: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(file_entry("ann", KEY) + "requests_per_minute = 2\n")
    with served(tmp_path, *models_of(TINY, f"other={other}"), "--api-keys", str(keys)) as server:
        keyed = {"authorization": f"Bearer {KEY}"}
        for name, status in (("tiny", 200), ("other", 200), ("tiny", 429), ("other", 429)):
            body = {"prompt": "Hi", "max_tokens": 1, "model": name}
            reply = httpx.post(
                server.url + COMPLETIONS, json=body, headers=keyed, timeout=PATIENCE_S
            )
            assert reply.status_code == status, reply.text
