"""Stemma's own endpoints and embeddings, through the clients that people have."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import zmq
from http_server import http_client

from stemma.frontend.client.backend import Backend
from stemma.frontend.client.client import Connection
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.sampler import NON_FINITE
from stemma.runtime.gateway.gateway import Gateway
from stemma.runtime.loaded_model import LoadedModel

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


def test_langchains_default_of_openais_ids_is_told_its_remedy(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its encoding is loaded from the network: here another one stands for it."""
    langchain, tiktoken = map(pytest.importorskip, ("langchain_openai", "tiktoken"))
    ranks = {bytes([byte]): 90_000 + byte for byte in range(256)}
    pattern: dict[str, Any] = {"pat_str": r"[\s\S]", "special_tokens": {}}
    encoding = tiktoken.Encoding("cl100k_base", mergeable_ranks=ranks, **pattern)
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", encoding)
    asked = {"model": MODEL, "base_url": f"{served.url}/v1", "api_key": "none", "max_retries": 0}
    embeddings = langchain.OpenAIEmbeddings(**asked)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught:
        embeddings.embed_query("a red kite")
    assert caught.value.param == "input"


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
    assert back == {"text": text, "prompt": text, "content": text}
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
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}] * 8193}, "messages"),
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
    for refused in (
        http.get("/tree", params={"replica": 7}),
        http.post("/set_role", params={"role": "decode", "replica": 7}),
    ):
        assert refused.status_code == 400 and "there is one engine" in refused.text
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


# --- generating -----------------------------------------------------------------------------------

PROMPT = "Nora has a red kite. Tom has a"
GREEDY = {"temperature": 0, "max_new_tokens": 12}


def events_of(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = http.post("/generate", json={**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line for line in answer.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_text_and_its_ids_generate_the_same_and_openai_agrees(
    http: httpx.Client, client: openai.OpenAI
) -> None:
    answer = http.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY}).json()
    ids = http.post("/tokenize", json={"text": PROMPT}).json()["tokens"]
    of_ids = http.post("/generate", json={"input_ids": ids, "sampling_params": GREEDY}).json()
    theirs = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=12)
    assert answer["text"] == of_ids["text"] == theirs.choices[0].text != ""
    assert answer["output_ids"] == of_ids["output_ids"]
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] == len(ids)
    assert meta["completion_tokens"] in (len(answer["output_ids"]), len(answer["output_ids"]) + 1)
    assert meta["finish_reason"]["type"] in ("stop", "length") and meta["e2e_latency"] > 0
    assert of_ids["meta_info"]["cached_tokens"] == len(ids) - 1


def test_a_prediction_changes_no_text_and_is_accounted_for(http: httpx.Client) -> None:
    plain = http.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY}).json()
    body = {"text": PROMPT, "sampling_params": {**GREEDY, "prediction": plain["text"]}}
    answer = http.post("/generate", json=body).json()
    assert answer["output_ids"] == plain["output_ids"]
    names = {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert names <= answer["meta_info"].keys() and not names & plain["meta_info"].keys()
    assert {"drafted_tokens", "accepted_tokens"} <= plain["meta_info"].keys()
    assert names <= events_of(http, body)[-1]["meta_info"].keys()


def test_a_batch_has_sampling_of_each_prompt_and_as_many_answers(http: httpx.Client) -> None:
    two = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    body = {
        "text": [PROMPT, "The boat is"],
        "sampling_params": [{**GREEDY, "regex": "[0-9]{3}"}, two],
    }
    first, second = http.post("/generate", json=body).json()
    assert first["text"].isdigit() and len(first["text"]) == 3
    assert second["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    samples = {**GREEDY, "temperature": 1.0, "seed": 5, "n": 2}
    several = http.post("/generate", json={"text": PROMPT, "sampling_params": samples}).json()
    assert len(several) == 2 and several[0]["output_ids"] != several[1]["output_ids"]


def test_a_streams_events_have_all_the_text_so_far_or_what_is_new(http: httpx.Client) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY}
    whole = http.post("/generate", json=body).json()
    events = events_of(http, body)
    assert events  # perhaps one: what was said before is guessed
    for event, later in itertools.pairwise(events):
        assert later["text"].startswith(event["text"])
        assert later["output_ids"][: len(event["output_ids"])] == event["output_ids"]
        assert event["meta_info"]["finish_reason"] is None
        assert event["meta_info"]["prompt_tokens"] == whole["meta_info"]["prompt_tokens"]
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]
    fresh = events_of(http, {**body, "incremental": True})
    assert "".join(event["text"] for event in fresh) == whole["text"]
    assert [i for event in fresh for i in event["output_ids"]] == whole["output_ids"]
    batch = events_of(http, {**body, "text": [PROMPT, PROMPT]})
    last = {event["index"]: event for event in batch}
    assert [last[index]["text"] for index in (0, 1)] == [whole["text"]] * 2


def test_logprobs_are_told_as_sglang_does(http: httpx.Client) -> None:
    body = {
        "text": PROMPT,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    answer = http.post("/generate", json=body).json()
    meta = answer["meta_info"]
    prompt, output = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert len(prompt) == meta["prompt_tokens"] and prompt[0][0] is None
    assert all(logprob <= 0 for logprob, _, _ in [*prompt[1:], *output])
    assert [token_id for _, token_id, _ in output][: len(answer["output_ids"])] == answer[
        "output_ids"
    ]
    best, second = meta["output_top_logprobs"][0]
    assert best[1:] == output[0][1:] and best[0] == pytest.approx(output[0][0], abs=1e-4)
    assert best[0] >= second[0] and isinstance(best[2], str)
    plain = http.post("/generate", json={"text": PROMPT, "sampling_params": GREEDY}).json()
    assert "output_token_logprobs" not in plain["meta_info"]
    streamed = events_of(http, body)[-1]["meta_info"]
    assert len(streamed["output_token_logprobs"]) == len(output)


def test_no_new_tokens_compute_the_prompt_only(http: httpx.Client) -> None:
    asked = {"text": "Nora has a red kite, and", "sampling_params": {"max_new_tokens": 0}}
    answer = http.post("/generate", json={**asked, "return_logprob": True, "logprob_start_len": 0})
    meta = answer.json()["meta_info"]
    assert (answer.json()["text"], answer.json()["output_ids"]) == ("", [])
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert http.post("/generate", json=asked).json()["meta_info"]["cached_tokens"] > 0
    body = {"model": MODEL, "prompt": asked["text"], "max_tokens": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"top_p": "x"}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"n": 10**9}}, "sampling_params.n"),
        (
            {"text": "a", "sampling_params": {"skip_special_tokens": False}},
            "sampling_params.skip_special_tokens",
        ),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        (
            {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]},
            "sampling_params.n",
        ),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "sampling_params": {"regex": "("}}, "regex"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, None),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 99}, None),
        ({"text": "a", "sampling_params": {"prediction": 3}}, "sampling_params.prediction"),
    ],
    ids=str,
)
def test_generate_refuses_with_the_field_at_fault(
    http: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    error = error_of(http.post("/generate", json=fields))
    assert param is None or error["param"] == param


# --- scoring --------------------------------------------------------------------------------------


def test_scores_are_the_log_probabilities_of_the_choices_tokens(http: httpx.Client) -> None:
    choices = [" red", " blue boat", " x"]
    answer = http.post("/score", json={"text": PROMPT, "choices": choices}).json()
    ids = http.post(
        "/tokenize", json={"text": [PROMPT, choices[1]], "add_special_tokens": False}
    ).json()["tokens"]
    bos = http.post("/tokenize", json={"text": PROMPT}).json()["tokens"]
    body = {
        "input_ids": [*bos, *ids[1]],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": len(bos),
    }
    meta = http.post("/generate", json=body).json()["meta_info"]
    expected = [logprob for logprob, _, _ in meta["input_token_logprobs"]]
    assert answer["token_logprobs"][1] == pytest.approx(expected, abs=1e-3)
    assert answer["logprobs"][1] == pytest.approx(sum(expected), abs=1e-3)
    assert sum(answer["probabilities"]) == pytest.approx(1.0)
    normalized = answer["normalized_logprobs"]
    assert normalized[1] == pytest.approx(sum(expected) / len(expected), abs=1e-3)
    assert answer["best"] == normalized.index(max(normalized))
    of_ids = http.post("/score", json={"input_ids": [bos], "choices": [ids[1], [5]]}).json()
    assert of_ids[0]["logprobs"][0] == pytest.approx(answer["logprobs"][1], abs=1e-3)
    chat = http.post("/score", json={"messages": CHAT, "choices": choices}).json()
    assert chat["choices"] == choices and chat["logprobs"] != answer["logprobs"]


def test_labels_are_scored_as_sglang_does(http: httpx.Client) -> None:
    labels = [17, 40]
    body = {"query": PROMPT, "items": [" red", " blue"], "label_token_ids": labels}
    answer = http.post("/v1/score", json=body).json()
    own = {"text": [f"{PROMPT} red", f"{PROMPT} blue"], "choices": [[i] for i in labels]}
    expected = [
        [math.exp(logprob) for logprob in item["logprobs"]]
        for item in http.post("/score", json=own).json()
    ]
    for scores, wanted in zip(answer["scores"], expected, strict=True):
        assert scores == pytest.approx(wanted, rel=1e-2)
    soft = http.post("/v1/score", json={**body, "apply_softmax": True}).json()["scores"]
    assert all(sum(scores) == pytest.approx(1.0) for scores in soft)
    first = http.post("/v1/score", json={**body, "item_first": True}).json()["scores"]
    assert first != answer["scores"] and answer["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"choices": ["a"]}, "text"),
        ("/score", {"text": "a", "choices": []}, None),
        ("/score", {"text": "a", "choices": ["a", ""]}, "choices"),
        ("/score", {"text": "a", "messages": CHAT, "choices": ["a"]}, "messages"),
        ("/score", {"messages": [CHAT[0]] * 8193, "choices": ["a"]}, "messages"),
        ("/score", {"text": "a", "choices": [[10**6]]}, None),
        ("/score", {"text": ["a"] * 2048, "choices": ["b"] * 1024}, "choices"),
        ("/v1/score", {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
        ("/v1/score", {"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids"),
        (
            "/v1/score",
            {"query": "q" * 20_000, "items": ["b"] * 2000, "label_token_ids": [1]},
            "query",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_scores_are_refused_with_the_field_at_fault(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    error = error_of(http.post(path, json=fields))
    assert param is None or error["param"] == param


def test_values_share_kv_with_the_same_salt_only(http: httpx.Client) -> None:
    def cached(path: str, salt: str, **fields: Any) -> int:
        answer = http.post(path, json={"cache_salt": salt, **fields}).json()
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    fields = {"input": "a heron stands in the reeds"}
    assert cached("/v1/embeddings", "x", **fields) == 0
    assert cached("/v1/embeddings", "x", **fields) > 0
    assert cached("/v1/embeddings", "y", **fields) == 0
    of_score = {"text": "a heron stands in the reeds", "choices": [" now"]}
    assert cached("/score", "z", **of_score) == 0
    assert cached("/score", "x", **of_score) > 0


# --- aborting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/abort", "/abort_request"])
def test_an_aborted_request_ends_with_what_it_has(http: httpx.Client, path: str) -> None:
    body = {
        "text": PROMPT,
        "rid": f"mine{path}",
        "stream": True,
        "sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True},
    }
    with http.stream("POST", "/generate", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["meta_info"]["id"] == body["rid"]
        aborted = http.post(path, json={"rid": body["rid"]}).json()
        *_, last, done = lines
    assert aborted == {"aborted": 1} and done == "data: [DONE]"
    ended = json.loads(last.removeprefix("data: "))
    assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    assert ended["text"].startswith(first["text"])
    assert http.post(path, json={"rid": body["rid"]}).json() == {"aborted": 0}


def test_all_of_a_callers_requests_can_be_aborted_but_no_others(http: httpx.Client) -> None:
    body = {
        "text": PROMPT,
        "stream": True,
        "sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True},
    }
    with http.stream("POST", "/generate", json=body, headers={"x-stemma-tenant": "a"}) as answer:
        lines = answer.iter_lines()
        next(lines)
        others = http.post("/abort", json={"abort_all": True}, headers={"x-stemma-tenant": "b"})
        assert others.json() == {"aborted": 0}
        own = http.post("/abort", json={"abort_all": True}, headers={"x-stemma-tenant": "a"})
        assert own.json() == {"aborted": 1}
        assert [line for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize(
    "fields", [{}, {"id": "a", "rid": "b"}, {"id": "a", "abort_all": True}, {"id": ""}], ids=str
)
def test_abort_says_what_it_needs(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert error_of(http.post("/abort", json=fields))["param"] == "id"


# --- a row that fails -----------------------------------------------------------------------------

POISON = 7  # what follows this token is not finite


@pytest.fixture(scope="module")
def spoiled(checkpoint: Path) -> Iterator[Backend]:
    """An engine whose logits behind a poisoned token are NaN."""
    loaded = LoadedModel(EngineConfig(model=checkpoint, dtype="float32", max_total_tokens=1024))
    steps = loaded.runner.steps
    forward = steps.forward

    def spoil(batch: Any) -> torch.Tensor:
        states = forward(batch).clone()
        states[batch.input_ids == POISON] = torch.nan
        return states

    steps.forward = spoil  # type: ignore[assignment]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gateway = Gateway(loaded, ["inproc://spoiled"], context=context)
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    backend = Backend(Connection("inproc://spoiled", context=context))
    yield backend
    backend.connection.close()
    gateway.stop()
    thread.join(10)


GOOD, BAD = [65, 66, 67, 68], [65, 66, 69, POISON]
# Greedy, and never the poison itself.
PLAIN = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True, "logit_bias": {POISON: -100}}


def test_a_row_that_is_not_finite_ends_alone_in_its_list(spoiled: Backend) -> None:
    with http_client(spoiled) as http:
        alone = http.post("/generate", json={"input_ids": GOOD, "sampling_params": PLAIN}).json()
        body = {"input_ids": [GOOD, BAD, GOOD], "sampling_params": PLAIN}
        reply = http.post("/generate", json=body)
    assert reply.status_code == 200
    first, failed, last = reply.json()
    for answer in (first, last):
        assert answer["output_ids"] == alone["output_ids"] and len(answer["output_ids"]) == 5
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert (failed["text"], failed["output_ids"]) == ("", [])
    reason = failed["meta_info"]["finish_reason"]
    assert reason == {"type": "error", "message": NON_FINITE, "status_code": 503}


@pytest.mark.parametrize("incremental", [False, True])
def test_a_streamed_row_that_is_not_finite_ends_alone(spoiled: Backend, incremental: bool) -> None:
    """After some text, which its last event keeps; the other streams go on."""
    # Two tokens of its choice, then the poison, then a choice that it cannot make.
    regex = {**PLAIN, "logit_bias": {}, "regex": r"[ab]{2}\x07[cd]"}
    body = {
        "input_ids": [GOOD, BAD[:3]], "sampling_params": [PLAIN, regex], "stream": True,
        "incremental": incremental,
    }  # fmt: skip
    with http_client(spoiled) as http:
        reply = http.post("/generate", json=body)
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert reply.status_code == 200 and lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    ends = {e["index"]: e for e in events if e["meta_info"]["finish_reason"] is not None}
    assert ends[0]["meta_info"]["finish_reason"]["type"] == "length"
    assert ends[1]["meta_info"]["finish_reason"]["type"] == "error"
    texts = [event["text"] for event in events if event["index"] == 1]
    said = "".join(texts) if incremental else texts[-1]
    assert re.fullmatch("[ab]{2}\x07?", said) and len(texts) > 1


def test_where_all_rows_fail_so_does_the_request(spoiled: Backend) -> None:
    with http_client(spoiled) as http:
        for ids in (BAD, [BAD], [BAD, BAD]):
            for stream in (False, True):
                body = {"input_ids": ids, "sampling_params": PLAIN, "stream": stream}
                reply = http.post("/generate", json=body)
                assert NON_FINITE in reply.text
                if not stream:
                    assert (reply.status_code, reply.json()["error"]["message"]) == (
                        503,
                        NON_FINITE,
                    )
        two = http.post("/generate", json={"input_ids": BAD, "sampling_params": {**PLAIN, "n": 2}})
        assert (two.status_code, two.json()["error"]["message"]) == (503, NON_FINITE)


def test_what_is_at_fault_refuses_the_whole_list(spoiled: Backend) -> None:
    with http_client(spoiled) as http:
        body = {"input_ids": [GOOD, GOOD * 500], "sampling_params": PLAIN}
        error = error_of(http.post("/generate", json=body))
    assert error["code"] == "context_length_exceeded"
