"""What sentence-transformers files say of a checkpoint's embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemma.runtime.checkpoint.config.embedding_config import EmbeddingConfig

MODULES = "sentence_transformers.models"


def folder_with(folder: Path, pooling: Any, *more: str) -> Path:
    names = ["Transformer", "Pooling", "Normalize", *more]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"{MODULES}.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_a_model_without_such_files_pools_its_last_token(tmp_path: Path) -> None:
    assert EmbeddingConfig.from_folder(tmp_path) == EmbeddingConfig("last", None, is_declared=False)


@pytest.mark.parametrize(("mode", "pooling"), [("mean_tokens", "mean"), ("lasttoken", "last")])
def test_the_files_say_which_pooling_the_model_was_trained_with(
    tmp_path: Path, mode: str, pooling: str
) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens")}
    config = {"word_embedding_dimension": 64, **modes, f"pooling_mode_{mode}": True}
    found = EmbeddingConfig.from_folder(folder_with(tmp_path, config))
    assert found == EmbeddingConfig(pooling, None, is_declared=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pooling", "more", "reason"),
    [
        ({"pooling_mode_cls_token": True}, (), "pooling ['cls_token'] is not supported"),
        ({}, (), "pooling [] is not supported"),
        ({"pooling_mode_lasttoken": True}, ("Dense",), "modules ['Dense'] are not supported"),
        ([1], (), "sentence-transformers files"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_reason(
    tmp_path: Path, pooling: Any, more: tuple[str, ...], reason: str
) -> None:
    found = EmbeddingConfig.from_folder(folder_with(tmp_path, pooling, *more))
    assert found.refusal is not None and reason in found.refusal


def test_files_that_are_no_json_refuse_embeddings_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    found = EmbeddingConfig.from_folder(tmp_path)
    assert found.refusal is not None and "sentence-transformers files" in found.refusal
