"""Encoders against transformers', on small random checkpoints: two unusual configurations each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from encoders import make_encoder

from stemma.runtime.execute.encoder_runner import EncoderRunner
from stemma.runtime.models.encoders.registry import read_encoder
from stemma.runtime.schedule.plan import Encoding, Row, StepPlan

TOLERANCE = 5e-5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-wide-heads": ("BertModel", {"hidden_size": 40, "num_attention_heads": 2}),
    "bert-relu-three-types": (
        "BertForMaskedLM",
        {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3,
         "num_hidden_layers": 3},
    ),
    "roberta-padding-5": ("RobertaModel", {"pad_token_id": 5, "hidden_act": "gelu_new"}),
    "xlm-roberta-one-type": (
        "XLMRobertaModel",
        {"type_vocab_size": 1, "num_attention_heads": 6, "intermediate_size": 80},
    ),
    "camembert": ("CamembertModel", {"num_hidden_layers": 1}),
    "modernbert-narrow-window": (
        "ModernBertModel",
        {"local_attention": 6, "num_hidden_layers": 4, "global_attn_every_n_layers": 2},
    ),
    "modernbert-biases": (
        "ModernBertForMaskedLM",
        {"local_attention": 16, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
         "num_attention_heads": 2, "hidden_activation": "silu"},
    ),
    "jina-v3": ("JinaEmbeddingsV3Model", {"type_vocab_size": 1}),
    "jina-v3-other-base": (
        "JinaEmbeddingsV3Model",
        {"type_vocab_size": 2, "num_attention_heads": 3, "rope_parameters":
         {"rope_type": "default", "rope_theta": 77.0}},
    ),
    "distilbert-wide-heads": (
        "DistilBertModel", {"num_attention_heads": 2, "intermediate_size": 80}
    ),
    "distilbert-relu": ("DistilBertForMaskedLM", {"activation": "relu", "num_hidden_layers": 3}),
    "mpnet": ("MPNetModel", {"hidden_size": 40, "num_attention_heads": 2}),
    "mpnet-far": (
        "MPNetForMaskedLM",
        {"max_position_embeddings": 302, "num_attention_heads": 6, "layer_norm_eps": 1e-3},
    ),
}  # fmt: skip
CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-one": ("BertForSequenceClassification", {"num_labels": 1}),
    "bert-three": ("BertForSequenceClassification", {"num_labels": 3, "type_vocab_size": 2}),
    "xlm-roberta-one": ("XLMRobertaForSequenceClassification", {"num_labels": 1}),
    "roberta-four": ("RobertaForSequenceClassification", {"num_labels": 4, "hidden_size": 36}),
    "modernbert-mean": (
        "ModernBertForSequenceClassification",
        {"num_labels": 1, "classifier_pooling": "mean", "local_attention": 8,
         "classifier_bias": True},
    ),
    "modernbert-cls": ("ModernBertForSequenceClassification", {"num_labels": 2}),
    "distilbert-two": ("DistilBertForSequenceClassification", {"num_labels": 2}),
    "mpnet-one": ("MPNetForSequenceClassification", {"num_labels": 1}),
    "jina-v3-one": ("JinaEmbeddingsV3ForSequenceClassification", {"num_labels": 1}),
}  # fmt: skip
LENGTHS = (9, 1, 40, 9, 100, 3)


def texts_of(vocab_size: int, lengths: Sequence[int] = LENGTHS) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(7)
    draw = [torch.randint(6, vocab_size, (n,), generator=generator) for n in lengths]
    return [tuple(ids.tolist()) for ids in draw]


def runner_of(folder: Path, dtype: str = "float32", **options: Any) -> EncoderRunner:
    config = read_encoder(folder)
    assert config is not None
    return EncoderRunner(folder, config, dtype=dtype, **options)


def computed(
    runner: EncoderRunner,
    texts: Sequence[Sequence[int]],
    pooling: str = "mean",
    *,
    has_scores: bool = False,
    num_first: int | None = None,
) -> list[np.ndarray[Any, Any]]:
    encoding = Encoding(pooling, has_scores, num_first)
    rows = [Row(i, i, 0, tuple(text), encoding=encoding) for i, text in enumerate(texts)]
    results = runner.submit(StepPlan(1, tuple(rows))).result().rows
    assert all(result.error is None for result in results)
    return [result.pooled for result in results if result.pooled is not None]


def transformers_model(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    import transformers

    name = architecture.replace("ForMaskedLM", "Model")
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("encoders")
    made = {}
    for seed, (name, (architecture, fields)) in enumerate({**CASES, **CLASSIFIERS}.items()):
        made[name] = make_encoder(root / name, architecture, seed=seed, **fields)
    return made


@pytest.mark.parametrize("case", CASES)
def test_vectors_of_a_batch_are_those_of_transformers_text_by_text(
    folders: dict[str, Path], case: str
) -> None:
    architecture = CASES[case][0]
    runner = runner_of(folders[case])
    model = transformers_model(folders[case], architecture, torch.float32)
    lengths = (*LENGTHS, 260) if case == "mpnet-far" else LENGTHS  # beyond the farthest bucket
    texts = texts_of(runner.config.vocab_size, lengths)
    for pooling in ("mean", "cls", "last"):
        for text, vector in zip(texts, computed(runner, texts, pooling), strict=True):
            with torch.no_grad():
                hidden = model(input_ids=torch.tensor([text])).last_hidden_state[0].double()
            expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
            np.testing.assert_allclose(vector, expected.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_scores_of_pairs_are_those_of_transformers(folders: dict[str, Path], case: str) -> None:
    architecture = CLASSIFIERS[case][0]
    runner = runner_of(folders[case])
    model = transformers_model(folders[case], architecture, torch.float32)
    texts = [text for text in texts_of(runner.config.vocab_size) if len(text) > 2]
    head = runner.config.head
    assert head is not None
    has_types = runner.config.num_token_types > 1 and architecture.startswith("Bert")
    scores = computed(
        runner, texts, head.pooling, has_scores=True, num_first=2 if has_types else None
    )
    for text, found in zip(texts, scores, strict=True):
        types = {"token_type_ids": torch.tensor([[0, 0] + [1] * (len(text) - 2)])}
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text]), **types if has_types else {}).logits[0]
        np.testing.assert_allclose(found, logits.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", [*CASES, *CLASSIFIERS])
def test_a_result_has_the_same_bits_whatever_else_is_in_the_batch(
    folders: dict[str, Path], case: str
) -> None:
    runner = runner_of(folders[case], "float64", kernels="reference")
    has_scores = case in CLASSIFIERS
    texts = texts_of(runner.config.vocab_size, (9, 1, 40, 9, 9, 77, 3))
    together = computed(runner, texts, "cls", has_scores=has_scores)
    for text, vector in zip(texts, together, strict=True):
        (alone,) = computed(runner, [text], "cls", has_scores=has_scores)
        assert alone.tobytes() == vector.tobytes()
