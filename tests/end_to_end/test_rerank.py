"""Documents in the order in which they answer a query, on the embedded model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_thread import engine_in_thread
from http_server import http_client

from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

QUERY = "Who has a red kite?"
DOCUMENTS = ["Nora has a red kite.", "Tom has a blue boat.", "It rains."]


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of a model whose files say that it was trained for embeddings."""
    folder = tmp_path_factory.mktemp("model") / "embedder"
    shutil.copytree(EMBEDDED_MODEL, folder)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling",
         "type": "sentence_transformers.models.Pooling"},
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with engine_in_thread(folder, max_total_tokens=4096) as engine:
        with http_client(engine) as client:
            yield client


def rerank(http: httpx.Client, path: str = "/rerank", **fields: Any) -> dict[str, Any]:
    reply = http.post(path, json={"query": QUERY, "documents": DOCUMENTS, **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def by_index(answer: dict[str, Any]) -> list[float]:
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    return [scores[index] for index in sorted(scores)]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"])
def test_the_best_come_first_each_with_its_place_and_text(http: httpx.Client, path: str) -> None:
    answer = rerank(http, path)
    results = answer["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in results) == [0, 1, 2]
    for result in results:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    assert answer["usage"]["total_tokens"] > 100 and answer["method"] == "yes_no"


def test_a_score_is_the_share_of_yes_among_yes_and_no(http: httpx.Client) -> None:
    scores = by_index(rerank(http, instruction="Find it"))
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    for document, score in zip(DOCUMENTS, scores, strict=True):
        asked = f"<Instruct>: Find it\n<Query>: {QUERY}\n<Document>: {document}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": asked}]
        body = {"messages": messages, "choices": ["yes", "no"]}
        expected = http.post("/score", json=body).json()["probabilities"][0]
        assert score == pytest.approx(expected, rel=0.05)


def test_only_the_first_are_told_where_so_many_are_asked_for(http: httpx.Client) -> None:
    documents = [{"text": text} for text in DOCUMENTS]
    answer = rerank(http, documents=documents, top_n=1, return_documents=False)
    (best,) = answer["results"]
    assert best.keys() == {"index", "relevance_score"}
    assert best["index"] == rerank(http)["results"][0]["index"]


def test_a_model_made_for_embeddings_gives_cosines(embedder: httpx.Client) -> None:
    answer = rerank(embedder)
    body = {"input": [QUERY, *DOCUMENTS]}
    data = embedder.post("/v1/embeddings", json=body).json()["data"]
    query, *documents = (item["embedding"] for item in data)
    expected = [math.fsum(a * b for a, b in zip(query, each)) for each in documents]
    assert answer["method"] == "cosine"
    assert by_index(answer) == pytest.approx(expected, abs=1e-3)
    assert rerank(embedder, method="yes_no")["method"] == "yes_no"
    assert "embedding" in embedder.post("/api/show", json={}).json()["capabilities"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a", ""]}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": [{"title": "a"}]}, None),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["a"] * 2000, "query": "q" * 20_000}, "query"),
        ({"method": "bm25"}, "method"),
        ({"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
        ({"documents": ["word " * 9000]}, None),
    ],
    ids=str,
)
def test_what_cannot_be_ranked_is_refused(
    http: httpx.Client, fields: dict[str, Any], param: str | None
) -> None:
    reply = http.post("/rerank", json={"query": QUERY, "documents": DOCUMENTS, **fields})
    assert reply.status_code == 400, reply.text
    assert param is None or reply.json()["error"]["param"] == param
