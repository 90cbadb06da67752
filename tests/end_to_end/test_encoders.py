"""Encoders and classifiers behind the HTTP routes, with real tokenizers and real clients."""

from __future__ import annotations

import base64
import json
import math
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from encoders import TEXTS, make_encoder, with_sentence_files
from engine_thread import engine_in_thread, load
from http_server import http_client, http_server
from openai import BadRequestError, OpenAI
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.cli.serve import example_request
from stemma.runtime.config import EngineConfig
from stemma.server.access.api_keys import new_key

TOLERANCE = 5e-5
PROMPTS = {"query": "Represent this: ", "document": ""}


@contextmanager
def client_of(folder: Path, **options: Any) -> Iterator[httpx.Client]:
    with (
        engine_in_thread(folder, dtype="float32", **options) as engine,
        http_client(engine) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def bge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder(tmp_path_factory.mktemp("models") / "bge", "BertModel", seed=1)
    return with_sentence_files(folder, max_seq_length=64, prompts=PROMPTS, dense=(20,))


@pytest.fixture(scope="module")
def http(bge: Path) -> Iterator[httpx.Client]:
    with client_of(bge) as client:
        yield client


@pytest.fixture(scope="module")
def reranker_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bge-reranker"
    return make_encoder(folder, "XLMRobertaForSequenceClassification", seed=2, num_labels=1)


@pytest.fixture(scope="module")
def reranker(reranker_folder: Path) -> Iterator[httpx.Client]:
    with client_of(reranker_folder) as client:
        yield client


def sentence_vector(folder: Path, text: str, pooling: str = "cls") -> np.ndarray[Any, Any]:
    """As sentence-transformers computes it: pooled, through the dense layers, normed."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import AutoModel

    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vector = hidden[0] if pooling == "cls" else hidden.mean(0)
        for dense in sorted(folder.glob("*_Dense")):
            weights = load_file(dense / "model.safetensors")
            vector = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
    return torch.nn.functional.normalize(vector, dim=0).numpy()


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(http: httpx.Client, path: str, **body: Any) -> str:
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def test_embeddings_are_those_of_sentence_transformers(http: httpx.Client, bge: Path) -> None:
    client = OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    data = client.embeddings.create(model="bge", input=list(TEXTS)).data
    for text, item in zip(TEXTS, data, strict=True):
        np.testing.assert_allclose(item.embedding, sentence_vector(bge, text), atol=TOLERANCE)


def test_a_prompt_is_put_before_a_text_by_its_name(http: httpx.Client, bge: Path) -> None:
    answer = post(http, "/v1/embeddings", input=TEXTS[0], prompt_name="query")
    expected = sentence_vector(bge, PROMPTS["query"] + TEXTS[0])
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=TOLERANCE)
    assert "document" in refused(http, "/v1/embeddings", input="a", prompt_name="passage")


def test_other_servers_fields_do_what_they_say_or_are_refused(
    http: httpx.Client, reranker: httpx.Client
) -> None:
    def vector(**body: Any) -> list[float]:
        return list(post(http, "/v1/embeddings", **body)["data"][0]["embedding"])

    text, long = TEXTS[0], " ".join(TEXTS * 2)
    assert vector(input=text, input_type="query") == vector(input=text, prompt_name="query")
    assert "input_type" in refused(http, "/v1/embeddings", input=text, input_type="passage")
    cut = vector(input=long, truncate_prompt_tokens=-1)
    assert vector(input=long, truncate="END") == vector(input=long, truncation=True) == cut
    assert "64" in refused(http, "/v1/embeddings", input=long, truncate="NONE")
    harmless = {"embedding_type": "float", "priority": 0, "user": "u", "truncation_side": "right"}
    assert vector(input=text, **harmless) == vector(input=text)
    others = {"late_chunking": True, "output_dimension": 4, "instruction": "x", "truncate": "START"}
    for name, value in others.items():
        assert name in refused(http, "/v1/embeddings", input=text, **{name: value})
    pair = {"query": "a", "documents": ["b"]}
    assert "top_k" in refused(reranker, "/rerank", **pair, top_k=1)
    assert "priority" in refused(reranker, "/score", text_1="a", text_2="b", priority=2)
    assert "softmax" in refused(reranker, "/classify", input="a", softmax=False)


def test_first_dimensions_and_base64(http: httpx.Client) -> None:
    whole = post(http, "/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"]
    body = {"input": TEXTS[0], "dimensions": 5, "encoding_format": "base64"}
    told = post(http, "/v1/embeddings", **body)["data"][0]["embedding"]
    values = array("f", base64.b64decode(told))
    plain = post(http, "/v1/embeddings", input=TEXTS[0], encoding_format=None)
    assert plain["data"][0]["embedding"] == whole
    length = math.hypot(*whole[:5])
    assert list(values) == pytest.approx([value / length for value in whole[:5]], abs=1e-6)
    assert "at most 20" in refused(http, "/v1/embeddings", input="a", dimensions=21)


def test_what_a_server_suggests_to_try_is_what_the_model_does(
    http: httpx.Client, reranker: httpx.Client
) -> None:
    for client in (http, reranker):
        path, body = example_request(client.get("/get_server_info").json())
        assert client.post(path, json=body).status_code == 200, path
    assert example_request({})[0] == "/v1/chat/completions"


def test_a_long_text_is_refused_with_the_limit_or_cut(http: httpx.Client) -> None:
    long = "red kite " * 60
    told = refused(http, "/v1/embeddings", input=long)
    assert "122 tokens > 64 maximum" in told and "truncate_prompt_tokens" in told
    one_more = refused(http, "/v1/embeddings", input="red " * 63)
    assert "65 tokens > 64 maximum" in one_more  # with the model's marks
    assert "at least 1, or -1" in refused(
        http, "/v1/embeddings", input="a", truncate_prompt_tokens=0
    )
    cut = post(http, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 64
    assert post(http, "/api/embed", input=long)["prompt_eval_count"] == 64
    assert "64" in refused(http, "/api/embed", input=long, truncate=False)
    short = post(http, "/v1/embeddings", input=long, truncate_prompt_tokens=8)
    again = post(http, "/v1/embeddings", input="red kite " * 3)
    assert short["usage"] == again["usage"] and short["data"] == again["data"]


@pytest.mark.parametrize(
    "given",
    ["", [], ["a", ""], [[]], [[10**6]], [[-1]], ["a"] * 10_000],
    ids=["empty", "none", "one-empty", "no-ids", "large-id", "negative", "many"],
)
def test_inputs_that_cannot_be_embedded_are_refused_by_name(http: httpx.Client, given: Any) -> None:
    assert "input" in refused(http, "/v1/embeddings", input=given)


def test_any_text_has_a_vector_and_ids_are_taken_as_they_are(http: httpx.Client) -> None:
    odd = ["\u200b", "🪁🪁", "日本語の凧", "a\x00b", "[SEP] [CLS]", "x" * 5000, " "]
    data = post(http, "/v1/embeddings", input=odd)["data"]
    assert all(math.hypot(*item["embedding"]) == pytest.approx(1) for item in data)
    ids = post(http, "/tokenize", prompt=TEXTS[0], add_special_tokens=False)["tokens"]
    marks = [2, *ids, 3]  # [CLS], [SEP]
    by_ids, by_text = (
        post(http, "/v1/embeddings", input=[marks]),
        post(http, "/v1/embeddings", input=TEXTS[0]),
    )
    assert by_ids["data"] == by_text["data"]


def test_generation_is_refused_with_what_the_model_does(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    client = OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    with pytest.raises(BadRequestError, match="generates nothing"):
        client.chat.completions.create(model="bge", messages=chat["messages"])  # type: ignore[arg-type]
    for path, body in (
        ("/v1/completions", {"prompt": "Hi"}),
        ("/generate", {"text": "Hi"}),
        ("/v1/messages", {"max_tokens": 5, **chat}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"model": "bge", **chat}),
        ("/completion", {"prompt": "Hi"}),
        ("/score", {"text": "Hi", "choices": ["a", "b"]}),
        ("/v1/score", {"query": "Hi", "items": ["a"], "label_token_ids": [5]}),
    ):
        assert "generates nothing" in refused(http, path, **body), path


def test_pairs_of_an_embedding_model_have_the_cosine(http: httpx.Client) -> None:
    one, two, three = (
        item["embedding"] for item in post(http, "/v1/embeddings", input=[*TEXTS[:3]])["data"]
    )
    scored = post(http, "/v1/score", text_1=TEXTS[0], text_2=[*TEXTS[1:3]])["data"]
    expected = [float(np.dot(one, two)), float(np.dot(one, three))]
    assert [item["score"] for item in scored] == pytest.approx(expected, abs=1e-5)
    ranked = post(http, "/rerank", query=TEXTS[0], documents=[*TEXTS[1:3]])
    assert ranked["method"] == "cosine"
    assert ranked["results"][0]["relevance_score"] == pytest.approx(max(expected), abs=1e-5)
    assert "scores texts" not in refused(http, "/classify", input="a")


def test_other_routes_know_an_encoder(http: httpx.Client) -> None:
    assert http.get("/v1/models").json()["data"][0]["id"] == "bge"
    assert http.get("/health").status_code == 200
    post(http, "/v1/embeddings", input="a")
    assert "stemma" in http.get("/metrics").text
    vectors = post(http, "/embedding", content=[*TEXTS[:2]])
    assert [len(item["embedding"][0]) for item in vectors] == [20, 20]
    assert http.get("/tree").status_code == 200


def logit_of(folder: Path, first: str, second: str) -> float:
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    encoding = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(first, second)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([encoding.ids])).logits[0, 0])


def test_a_cross_encoder_reranks_by_its_own_scores(
    reranker: httpx.Client, reranker_folder: Path
) -> None:
    logits = [logit_of(reranker_folder, TEXTS[3], text) for text in TEXTS[:3]]
    expected = [1 / (1 + math.exp(-logit)) for logit in logits]
    body = {"model": "bge-reranker", "query": TEXTS[3], "documents": [*TEXTS[:3]]}
    answer = post(reranker, "/v2/rerank", **body, top_n=2)
    assert answer["method"] == "scores"
    best = sorted(range(3), key=lambda index: -expected[index])[:2]
    assert [item["index"] for item in answer["results"]] == best
    for item in answer["results"]:
        assert item["relevance_score"] == pytest.approx(expected[item["index"]], abs=TOLERANCE)
    scored = post(reranker, "/score", text_1=TEXTS[3], text_2=[*TEXTS[:3]], use_activation=False)
    assert [each["score"] for each in scored["data"]] == pytest.approx(logits, abs=TOLERANCE)
    assert "scores texts and pairs" in refused(reranker, "/v1/embeddings", input="a")


def test_a_long_pair_is_cut_as_hugging_face_cuts_it(
    reranker: httpx.Client, reranker_folder: Path
) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    first, second = TEXTS[3] * 2, TEXTS[4] * 6
    tokenizer = Tokenizer.from_file(str(reranker_folder / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(reranker_folder).eval()
    for most in (20, 41, 60, 90):
        tokenizer.enable_truncation(most)
        ids = tokenizer.encode(first, second).ids
        with torch.no_grad():
            logit = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
        body = {"text_1": first, "text_2": second, "truncate_prompt_tokens": most}
        scored = post(reranker, "/v1/score", **body, use_activation=False)
        assert scored["usage"]["prompt_tokens"] == most
        assert scored["data"][0]["score"] == pytest.approx(logit, abs=TOLERANCE)


def test_labels_of_a_classifier_of_pairs(tmp_path: Path) -> None:
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    folder = make_encoder(
        tmp_path / "nli", "BertForSequenceClassification", seed=5, id2label=labels
    )
    from tokenizers import Tokenizer
    from transformers import AutoModelForSequenceClassification

    pair = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(*TEXTS[:2])
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        ids, types = torch.tensor([pair.ids]), torch.tensor([pair.type_ids])
        probs = model(input_ids=ids, token_type_ids=types).logits[0].softmax(-1)
    with client_of(folder) as http:
        (told,) = post(http, "/classify", input=[[*TEXTS[:2]]])["data"]
        assert told["probs"] == pytest.approx(probs.tolist(), abs=TOLERANCE)
        assert told["label"] == labels[int(probs.argmax())] and told["num_classes"] == 3
        assert "3 scores" in refused(http, "/rerank", query="a", documents=["b"])


def test_many_clients_share_steps_and_a_bad_one_harms_nobody(http: httpx.Client) -> None:
    alone = [post(http, "/v1/embeddings", input=text)["data"][0]["embedding"] for text in TEXTS]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        text = "red " * 500 if number % 4 == 3 else TEXTS[number % len(TEXTS)]
        found[number] = http.post("/v1/embeddings", json={"input": text})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, reply in found.items():
        assert reply.status_code == (400 if number % 4 == 3 else 200), reply.text
        if number % 4 != 3:
            vector = reply.json()["data"][0]["embedding"]
            np.testing.assert_allclose(vector, alone[number % len(TEXTS)], atol=1e-5)


def test_options_that_an_encoder_has_no_use_for_are_refused(bge: Path) -> None:
    for options in (
        {"enable_lora": True}, {"host_kv_tokens": 64}, {"max_model_len": 1000}, {"tp_size": 2},
    ):  # fmt: skip
        with pytest.raises(st.StemmaError, match=next(iter(options))):
            load(EngineConfig(model=bge, **options))


def test_jinas_layout_with_code_of_its_own_is_refused_by_name(tmp_path: Path, bge: Path) -> None:
    config = {"architectures": ["XLMRobertaModel"], "use_flash_attn": True,
              "auto_map": {"AutoModel": "x.y"}, "hidden_size": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(st.StemmaError, match="jina-embeddings-v3-hf"):
        load(EngineConfig(model=tmp_path))


def test_a_keys_text_is_answered_while_most_of_anothers_batch_waits(bge: Path) -> None:
    many, few = new_key(), new_key()
    with engine_in_thread(bge, dtype="float32", max_running_requests=8) as engine:
        with http_server(engine, api_key=(many, few)) as url:

            def embedded(key: str, texts: list[str]) -> int:
                headers = {"authorization": f"Bearer {key}"}
                body = {"input": texts}
                reply = httpx.post(
                    f"{url}/v1/embeddings", json=body, headers=headers, timeout=PATIENCE_S
                )
                assert reply.status_code == 200, reply.text
                return len(reply.json()["data"])

            def num_finished() -> int:
                return int(engine.get_server_info()["stats"]["num_finished"])

            with ThreadPoolExecutor(1) as one:
                batch = one.submit(embedded, many, [*TEXTS, *TEXTS[:3]] * 256)
                wait_until(lambda: num_finished() > 0)
                assert embedded(few, ["a kite"]) == 1
                assert num_finished() < 1024
                assert batch.result(PATIENCE_S) == 2048
