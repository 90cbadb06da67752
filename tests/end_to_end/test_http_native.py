"""Stemma's own endpoints and embeddings, through the clients that people have."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest

MODEL = "stemma-tiny"
CHAT = [{"role": "user", "content": "Hi, my name is Nora."}]


@pytest.fixture
def http(served: Any) -> Any:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


# --- embeddings -----------------------------------------------------------------------------------


def test_openai_gets_unit_vectors_that_do_not_depend_on_the_batch(client: openai.OpenAI) -> None:
    texts = ["Nora has a red kite.", "Tom has a blue boat.", "Nora has a red kite."]
    together = client.embeddings.create(model=MODEL, input=texts)  # as base64, its default
    alone = client.embeddings.create(model=MODEL, input=texts[1], encoding_format="float")
    vectors = [item.embedding for item in together.data]
    assert [item.index for item in together.data] == [0, 1, 2]
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-5)
    assert vectors[1] == pytest.approx(alone.data[0].embedding, abs=1e-4)
    assert math.hypot(*vectors[0]) == pytest.approx(1.0, abs=1e-5)
    assert math.dist(vectors[0], vectors[1]) > 0.01
    assert together.usage.total_tokens == together.usage.prompt_tokens > 10


def test_embeddings_of_token_ids_equal_those_of_their_text(
    client: openai.OpenAI, http: httpx.Client
) -> None:
    text = "The kite is red."
    ids = http.post("/tokenize", json={"text": text}).json()["tokens"]
    answer = client.embeddings.create(model=MODEL, input=[ids], encoding_format="float")
    expected = client.embeddings.create(model=MODEL, input=text, encoding_format="float")
    assert answer.data[0].embedding == pytest.approx(expected.data[0].embedding, abs=1e-4)
    assert answer.usage.prompt_tokens == len(ids)


def test_embeddings_pool_as_asked_and_shorten_to_length_one(http: httpx.Client) -> None:
    def embed(**fields: Any) -> list[float]:
        answer = http.post("/v1/embeddings", json={"input": "a red kite", **fields})
        vector: list[float] = answer.json()["data"][0]["embedding"]
        return vector

    last, mean = embed(), embed(pooling="mean")
    assert embed(pooling="last") == pytest.approx(last, abs=1e-4)
    assert math.dist(last, mean) > 0.01
    short = embed(dimensions=8)
    factor = math.hypot(*last[:8])
    assert short == pytest.approx([value / factor for value in last[:8]], abs=1e-3)
    raw = embed(normalize=False)
    assert math.hypot(*raw) != pytest.approx(1.0, abs=0.1)
    assert [value / math.hypot(*raw) for value in raw] == pytest.approx(last, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": "a", "dimensions": 100_000}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": [10**6]}, None),
        ({"input": [-1]}, None),
        ({"input": [2**70]}, None),
        ({"input": "word " * 20_000}, None),
    ],
    ids=str,
)
def test_embeddings_refuse_with_the_field_at_fault(
    http: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    error = error_of(http.post("/v1/embeddings", json=fields))
    assert param is None or error["param"] == param


def test_langchain_embeds_documents_and_queries(served: Any) -> None:
    langchain = pytest.importorskip("langchain_openai")
    embeddings = langchain.OpenAIEmbeddings(
        model=MODEL, base_url=f"{served.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    documents = embeddings.embed_documents(["a red kite", "a blue boat"])
    assert documents[0] == pytest.approx(embeddings.embed_query("a red kite"), abs=1e-4)


# --- tokens ---------------------------------------------------------------------------------------


def test_tokens_are_those_that_the_engine_computes_and_come_back_as_text(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    text = "Nora has a kite, née 凧 🎏 <|end|>."
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    completion = client.completions.create(model=MODEL, prompt=text, max_tokens=1)
    assert completion.usage is not None
    assert answer["count"] == len(answer["tokens"]) == completion.usage.prompt_tokens
    assert len(answer["token_strs"]) == answer["count"] and answer["max_model_len"] > 100
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"text": text, "prompt": text}
    batch = http.post("/tokenize", json={"text": [text, "a"]}).json()
    assert batch["tokens"][0] == answer["tokens"] and batch["count"][0] == answer["count"]
    texts = http.post("/detokenize", json={"input_ids": batch["tokens"]}).json()["text"]
    assert texts == [text, "a"]


def test_a_chat_is_tokenized_as_the_template_has_it(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    answer = http.post("/tokenize", json={"messages": CHAT}).json()
    chat = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1)  # type: ignore[arg-type]
    assert chat.usage is not None and answer["count"] == chat.usage.prompt_tokens
    closed = http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False}).json()
    assert answer["tokens"][: closed["count"]] == closed["tokens"] != answer["tokens"]
    shown = http.post(
        "/detokenize", json={"tokens": answer["tokens"], "skip_special_tokens": False}
    ).json()["text"]
    assert "my name is Nora" in shown and len(shown) > len(CHAT[0]["content"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "text"),
        ("/tokenize", {"text": "a", "prompt": "b"}, "text"),
        ("/tokenize", {"text": []}, "text"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"text": "a" * (9 * 1024 * 1024)}, "text"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**80]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tokens_are_refused_with_the_field_at_fault(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    error = error_of(http.post(path, json=fields))
    assert param is None or error["param"] == param


# --- the cache ------------------------------------------------------------------------------------


def test_the_tree_shows_what_is_cached_until_it_is_flushed(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    client.completions.create(model=MODEL, prompt="A purple heron stood still", max_tokens=1)
    tree = http.get("/tree", params={"max_token_ids": 16}).json()
    ids = {node["id"] for node in tree["nodes"]}
    assert all(node["parent"] is None or node["parent"] in ids for node in tree["nodes"])
    assert any("purple heron" in node["text"] for node in tree["nodes"])
    assert max(len(node["token_ids"]) for node in tree["nodes"]) <= 16
    assert len(http.get("/tree", params={"max_nodes": 1}).json()["nodes"]) < len(tree["nodes"])
    flushed = http.post("/flush_cache").json()
    assert flushed["status"] == "ok" and flushed["flushed_tokens"] > 0
    nodes = http.get("/tree").json()["nodes"]
    assert not any("purple heron" in node["text"] for node in nodes)
    assert http.get("/tree", params={"max_nodes": 10**9}).status_code == 400


def test_the_server_says_what_it_is(http: httpx.Client) -> None:
    info = http.get("/server_info").json()
    assert info["model"] == MODEL and info["stats"]["num_steps"] > 0 and info["version"]
    assert http.get("/get_server_info").json()["total_tokens"] == info["total_tokens"]
    model = http.get("/get_model_info").json()
    assert model["is_generation"] is True and model["model_path"].endswith("stemma-tiny")
