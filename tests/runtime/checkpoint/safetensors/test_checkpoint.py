"""Reading safetensors: single or sharded, conversion, stacking, errors that name the tensor."""

from __future__ import annotations

import json
import logging
import os
import struct
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.safetensors.checkpoint import CheckpointWeights

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(9.0).view(3, 3) + 100,
    "c": torch.ones(4, dtype=torch.bfloat16),
}


@pytest.fixture(params=["single", "sharded"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "single":
        save_file(TENSORS, tmp_path / "model.safetensors")
        return tmp_path
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    for file in set(shards.values()):
        save_file({n: TENSORS[n] for n, f in shards.items() if f == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tensors_arrive_in_the_target_dtype(folder: Path, dtype: torch.dtype) -> None:
    with closing(CheckpointWeights(folder, dtype)) as source:
        for name, tensor in TENSORS.items():
            taken = source.take(name, tensor.shape)
            assert taken.dtype is dtype and torch.equal(taken, tensor.to(dtype))


def test_stacked_tensors_follow_each_other(folder: Path) -> None:
    with closing(CheckpointWeights(folder, torch.float32)) as source:
        stacked = source.take_stacked(["b", "a"], [(3, 3), (2, 3)])
    assert torch.equal(stacked, torch.cat((TENSORS["b"], TENSORS["a"])))


def test_progress_grows_to_at_most_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with closing(
        CheckpointWeights(folder, torch.float32, on_progress=lambda *at: seen.append(at))
    ) as source:
        for name, tensor in TENSORS.items():
            source.take(name, tensor.shape)
    done = [at for at, _ in seen]
    assert done == sorted(done) and len(done) == 3 and done[-1] <= seen[-1][1]


def test_missing_and_misshapen_tensors_are_named(folder: Path) -> None:
    with closing(CheckpointWeights(folder, torch.float32)) as source:
        with pytest.raises(ModelLoadError, match="tensor 'd' is missing"):
            source.take("d", (1,))
        with pytest.raises(ModelLoadError, match=r"'a': expected shape \[3, 2\], found \[2, 3\]"):
            source.take("a", (3, 2))


def test_leftovers_are_logged_except_rotary_tables_and_skipped_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"x.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(2)}
    save_file({**TENSORS, **extra}, tmp_path / "model.safetensors")
    with (
        closing(CheckpointWeights(tmp_path, torch.float32)) as source,
        caplog.at_level(logging.WARNING),
    ):
        source.take("a", (2, 3))
        source.skip("lm_head.weight")
        source.finish()
    assert "2 tensors of the checkpoint are not used: b, c" in caplog.text


def test_missing_broken_and_foreign_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds neither model\.safetensors nor"):
        CheckpointWeights(tmp_path, torch.float32)
    single = tmp_path / "model.safetensors"
    single.write_bytes(b"not safetensors")
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        CheckpointWeights(tmp_path, torch.float32)
    single.rename(tmp_path / "other.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"gone\.safetensors is missing"):
        CheckpointWeights(tmp_path, torch.float32)
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelLoadError, match="not a plain file name"):
        CheckpointWeights(tmp_path, torch.float32)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="not a valid index"):
        CheckpointWeights(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "header",
    [
        '{"a":' * 100_000,
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, Infinity]}}',
        '{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 8]}}',
        "[]",
    ],
)
def test_a_header_that_lies_is_no_traceback(tmp_path: Path, header: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        CheckpointWeights(tmp_path, torch.float32)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="is a folder, a device or a pipe, not a file"):
        CheckpointWeights(tmp_path, torch.float32)


def test_a_single_file_counts_before_an_index_that_is_left_over(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    left_over = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(left_over))
    with closing(CheckpointWeights(tmp_path, torch.float32)) as source:
        assert torch.equal(source.take("a", (2, 3)), TENSORS["a"])


@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize("has_index", [True, False])
def test_the_tensors_of_a_bare_decoder_are_found(
    tmp_path: Path, has_output: bool, has_index: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen3-Embedding's names have no "model." before them."""
    names = ("embed_tokens.weight", "layers.0.x.weight")
    stored = {name: TENSORS["a"].clone() for name in names}
    stored |= {"lm_head.weight": TENSORS["b"]} if has_output else {}
    file = "one.safetensors" if has_index else "model.safetensors"
    save_file(stored, tmp_path / file)
    if has_index:
        index = {"weight_map": dict.fromkeys(stored, file)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with closing(CheckpointWeights(tmp_path, torch.float32)) as source:
        for name in ("model.embed_tokens.weight", "model.layers.0.x.weight"):
            assert name in source and torch.equal(source.take(name, (2, 3)), TENSORS["a"])
        if has_output:
            assert torch.equal(source.take("lm_head.weight", (3, 3)), TENSORS["b"])
        else:
            match = r"'lm_head.weight' is missing.*no output projection.*tie_word_embeddings"
            with pytest.raises(ModelLoadError, match=match):
                source.take("lm_head.weight", (3, 3))
        source.finish()
        assert not caplog.text
        with pytest.raises(ModelLoadError, match=r"'layers.0.x.weight': expected shape \[3, 2\]"):
            source.take("model.layers.0.x.weight", (3, 2))


def test_the_tensors_of_a_part_are_found_by_the_names_of_transformers_modules(
    tmp_path: Path,
) -> None:
    asked_for = {
        "model.language_model.embed_tokens.weight": "language_model.model.embed_tokens.weight",
        "model.language_model.layers.0.x.weight": "language_model.model.layers.0.x.weight",
        "model.vision_tower.y.weight": "vision_tower.y.weight",
        "lm_head.weight": "language_model.lm_head.weight",
    }
    save_file({name: TENSORS["a"].clone() for name in asked_for}, tmp_path / "model.safetensors")
    with closing(CheckpointWeights(tmp_path, torch.float32)) as source:
        for name in asked_for.values():
            assert name in source and torch.equal(source.take(name, (2, 3)), TENSORS["a"])


def test_no_room_is_made_for_what_the_checkpoint_does_not_have(folder: Path) -> None:
    with closing(CheckpointWeights(folder, torch.float32)) as source:
        huge = (1 << 31, 1 << 31)
        with pytest.raises(ModelLoadError, match="'a': expected shape"):
            source.take("a", huge)
        with pytest.raises(ModelLoadError, match="'b': expected shape"):
            source.take_stacked(["a", "b"], [(2, 3), huge])


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    save_file({"q": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with closing(CheckpointWeights(tmp_path, torch.float32)) as source:
        with pytest.raises(
            ModelLoadError,
            match=r"expected floating point, found torch\.int8.*no quantization_config",
        ):
            source.take("q", (2,))
