"""Embeddings and scores of models made from decoders: Qwen3-Embedding's and Qwen3-Reranker's
layouts, on small random checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from checkpoints import EOS_ID, make_checkpoint
from encoders import TEXTS, with_sentence_files
from engine_thread import engine_in_thread
from http_server import http_client
from tokenizers import Tokenizer, processors

TOLERANCE = 5e-5
PROMPTS = {"query": "Instruct: find it\nQuery:", "document": ""}


def with_suffix(folder: Path) -> Path:
    """Qwen3-Embedding's tokenizer puts a mark behind each text."""
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    mark = tokenizer.id_to_token(EOS_ID)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {mark}", pair=f"$A {mark} $B {mark}", special_tokens=[(mark, EOS_ID)]
    )
    tokenizer.save(str(path))
    return folder


def bare(folder: Path) -> Path:
    """The tensors' names without "model.", as the hub has Qwen3-Embedding."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
        if not name.startswith("lm_head")
    }
    save_file(tensors, path)
    return folder


CONFIGS: tuple[dict[str, Any], ...] = (
    {"head_dim": 24, "num_layers": 3, "num_heads": 6, "num_kv_heads": 3, "seed": 3},
    {"hidden_size": 48, "attention_bias": True, "seed": 4, "rope_theta": 500.0},
)


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_qwen3_embedding_pools_its_mark_behind_the_text(tmp_path: Path, index: int) -> None:
    folder = make_checkpoint(
        tmp_path / "qwen3-embedding", "qwen3", tie_word_embeddings=True, **CONFIGS[index]
    )
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder).eval()
    with_sentence_files(with_suffix(bare(folder)), "lasttoken", prompts=PROMPTS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with engine_in_thread(folder, dtype="float32", max_total_tokens=4096) as engine:
        with http_client(engine) as http:
            asked = {"input": [*TEXTS], "prompt_name": "query"}
            data = http.post("/v1/embeddings", json=asked).json()["data"]
            for text, item in zip(TEXTS, data, strict=True):
                ids = tokenizer.encode(PROMPTS["query"] + text).ids
                assert ids[-1] == EOS_ID
                with torch.no_grad():
                    state = model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
                expected = torch.nn.functional.normalize(state, dim=0).numpy()
                np.testing.assert_allclose(item["embedding"], expected, atol=TOLERANCE)
            for body in (
                {"input": TEXTS[0], "truncate_prompt_tokens": 9},
                {"input": TEXTS[0][:8]},
            ):
                found = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
                with torch.no_grad():
                    ids = torch.tensor([tokenizer.encode(TEXTS[0][:8]).ids])
                    state = model(input_ids=ids).last_hidden_state[0, -1]
                expected = torch.nn.functional.normalize(state, dim=0).numpy()
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Reranker as a sequence classifier of one label."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("models") / "qwen3-reranker", "qwen3", seed=8, head_dim=24
    )
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_labels, config.pad_token_id = 1, 258
    torch.manual_seed(1)
    model = transformers.Qwen3ForSequenceClassification.from_pretrained(folder, config=config)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def http(classifier: Path) -> Iterator[httpx.Client]:
    with engine_in_thread(classifier, dtype="float32", max_total_tokens=4096) as engine:
        with http_client(engine) as client:
            yield client


def test_a_converted_reranker_scores_texts_as_transformers_does(
    http: httpx.Client, classifier: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    tokenizer = Tokenizer.from_file(str(classifier / "tokenizer.json"))
    asked = {"input": [*TEXTS], "use_activation": False}
    data = http.post("/classify", json=asked).json()["data"]
    for text, item in zip(TEXTS, data, strict=True):
        ids = tokenizer.encode(text).ids
        with torch.no_grad():
            logit = float(model(input_ids=torch.tensor([ids])).logits[0, 0])
        assert item["probs"] == pytest.approx([logit], abs=TOLERANCE)


def test_it_reranks_by_the_question_it_was_trained_on_and_generates_nothing(
    http: httpx.Client,
) -> None:
    body = {"query": TEXTS[3], "documents": [*TEXTS[:3]]}
    answer = http.post("/rerank", json=body).json()
    assert answer["method"] == "scores"
    assert all(0 < item["relevance_score"] < 1 for item in answer["results"])
    body = {"text_1": TEXTS[3], "text_2": [*TEXTS[:3]]}
    scores = [item["score"] for item in http.post("/score", json=body).json()["data"]]
    told = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert [told[index] for index in range(3)] == pytest.approx(scores, abs=1e-6)
    reply = http.post("/v1/completions", json={"prompt": "Hi"})
    assert reply.status_code == 400 and "generates nothing" in reply.text
    reply = http.post("/classify", json={"input": [["a", "b"]]})
    assert reply.status_code == 400 and "one text at a time" in reply.text
