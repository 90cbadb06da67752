"""GGUF models in several files: what they hold together, and parts that do not fit each other."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import Kind, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from mixtures import make_mixture
from model_scores import make_runner, scores
from step_plans import PlanDriver

from stemma.cli.model_report import examine_model
from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.gguf.convert import convert_gguf, weights_files
from stemma.runtime.checkpoint.gguf.shards import GgufModel, model_stem, shard_name, shard_names
from stemma.runtime.checkpoint.loader import open_weights
from stemma.runtime.checkpoint.location import locate_model

TOKENS = list(range(40, 60))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def parts_of(folder: Path, name: str = "x") -> list[Path]:
    return sorted(folder.glob(f"{name}-*.gguf"))


@pytest.mark.parametrize("family", ["llama", "Mixtral"])
@pytest.mark.parametrize("is_first_small", [False, True])
def test_a_model_in_parts_is_that_of_one_file(
    tmp_path: Path, family: str, is_first_small: bool
) -> None:
    if family == "llama":
        make_checkpoint(tmp_path / "model")
    else:
        make_mixture(tmp_path / "model", family, intermediate_size=64, has_tokenizer=True)
    whole = write_gguf(tmp_path / "model", tmp_path / "whole.gguf", Kind.Q8_0)
    (tmp_path / "parts").mkdir()
    write_gguf(
        tmp_path / "model", tmp_path / "parts" / "x.gguf", Kind.Q8_0,
        split_max_tensors=5, small_first_shard=is_first_small,
    )  # fmt: skip
    parts = parts_of(tmp_path / "parts")
    assert len(parts) >= 5
    folder = locate_model(tmp_path / "parts")
    assert [locate_model(part) for part in parts] == [folder] * len(parts)
    assert [file.resolve() for file in weights_files(folder)] == parts
    assert folder.name.startswith("x-") and "of" not in folder.name
    expected, found = (
        scores(PlanDriver(make_runner(each, kernels="reference")), TOKENS, [7])[0]
        for each in (convert_gguf(whole), folder)
    )
    assert torch.equal(found, expected)
    names = ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json")
    for name in names:
        assert (folder / name).read_bytes() == (convert_gguf(whole) / name).read_bytes()


def test_the_doctor_counts_all_parts(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    (tmp_path / "parts").mkdir()
    write_gguf(checkpoint, tmp_path / "parts" / "x.gguf", split_max_tensors=7)
    folder = locate_model(parts_of(tmp_path / "parts")[1])
    report = examine_model("x", folder, "float32", 10**9, is_gpu=False)
    assert report["stored_quantization"] == "none"
    one = weights_files(folder)[-1].stat().st_size
    assert 8 * one / report["parameters"] < 12  # which would be taken for 8 bits or 4


def test_parts_that_have_moved_are_linked_again(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    write_gguf(checkpoint, tmp_path / "x.gguf", split_max_tensors=7)
    first = convert_gguf(parts_of(tmp_path)[0])
    (tmp_path / "new").mkdir()
    for part in parts_of(tmp_path):
        part.rename(tmp_path / "new" / part.name)
    assert not weights_files(first)
    assert convert_gguf(parts_of(tmp_path / "new")[2]) == first
    assert [file.resolve() for file in weights_files(first)] == parts_of(tmp_path / "new")
    assert not [entry for entry in first.iterdir() if entry.name.startswith(".")]


def write_part(
    folder: Path,
    number: int,
    count: int = 3,
    *,
    name: str | None = None,
    num_tensors: int = 3,
    tensor: str | None = None,
) -> Path:
    """A part with one tensor; number: from 1 on, as in its name."""
    path = folder / (name or f"x-{number:05}-of-{count:05}.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number - 1)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", num_tensors)
    writer.add_tensor(tensor or f"t{number}", np.full((2, 4), number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_tensor_is_read_from_its_own_part(tmp_path: Path) -> None:
    paths = [write_part(tmp_path, number) for number in (1, 2, 3)]
    with closing(GgufModel(paths[1])) as model:
        assert model.path == paths[0] and list(model.tensors) == ["t1", "t2", "t3"]
        for number in (1, 2, 3):
            rows = model.read(model.tensors[f"t{number}"], 1, 1).view(np.float32)
            assert (rows == number).all()


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_missing_part_is_named(tmp_path: Path, missing: int) -> None:
    for number in {1, 2, 3} - {missing}:
        write_part(tmp_path, number)
    match = rf"x-0000{missing}-of-00003\.gguf is missing: x-0000\d-of-00003\.gguf is one of 3 parts"
    for part in parts_of(tmp_path):
        with pytest.raises(ModelLoadError, match=match):
            GgufModel(part)
    with pytest.raises(ModelLoadError, match=match):
        locate_model(tmp_path)


def test_parts_that_do_not_agree_are_refused_by_field(tmp_path: Path) -> None:
    first = write_part(tmp_path, 1)
    write_part(tmp_path, 2)
    before = len(os.listdir("/proc/self/fd"))
    for third, match in (
        ({"number": 2}, "'split.no': expected 2, .*, found 1$"),
        ({"number": 3, "count": 4}, "'split.count': expected 3, as its name says, found 4$"),
        ({"number": 3, "num_tensors": 4}, "'split.tensors.count': expected 3, .*, found 4$"),
        ({"number": 3, "tensor": "t1"}, r"tensor 't1' is in x-00001-of-00003\.gguf, too$"),
    ):
        write_part(tmp_path, name="x-00003-of-00003.gguf", **third)  # type: ignore[arg-type]
        with pytest.raises(ModelLoadError, match=rf"x-00003-of-00003\.gguf: .*{match}"):
            GgufModel(first)
    (tmp_path / "x-00003-of-00003.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"x-00003-of-00003\.gguf: version"):
        GgufModel(first)
    assert len(os.listdir("/proc/self/fd")) == before


def test_parts_whose_names_say_something_else_are_refused(tmp_path: Path) -> None:
    alone = write_part(tmp_path, 2, name="x.gguf")
    with pytest.raises(ModelLoadError, match=r"'split\.count': .* a name like NAME-00001-of-00003"):
        GgufModel(alone)
    lying = write_part(tmp_path, 1, name="x-00001-of-00002.gguf")
    with pytest.raises(ModelLoadError, match=r"'split\.count': expected 2, as its name says, f"):
        GgufModel(lying)


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_of_one_part_is_whole_whatever_its_name(tmp_path: Path, count: int) -> None:
    """llama-gguf-split --merge leaves a count of 0."""
    path = write_part(tmp_path, 1, count, name="x-00002-of-00003.gguf", num_tensors=99)
    with closing(GgufModel(path)) as model:
        assert list(model.tensors) == ["t1"]


def test_a_folder_with_several_models_names_them(tmp_path: Path) -> None:
    write_part(tmp_path, 1)
    write_part(tmp_path, 2)
    write_part(tmp_path, 1, name="mmproj.gguf")
    match = rf"several GGUF files: mmproj\.gguf, x-00001-of-00003\.gguf; .* {tmp_path}/mmproj.gguf$"
    for name in ("config.json", "config.json.bak"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ModelLoadError, match=match):
            locate_model(tmp_path)


def test_a_config_beside_a_model_is_not_in_its_way(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    (tmp_path / "both").mkdir()
    file = write_gguf(checkpoint, tmp_path / "both" / "x.gguf")
    folder = convert_gguf(file)
    assert locate_model(tmp_path / "both") == locate_model(folder) == folder
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / name, tmp_path / "both")
    assert locate_model(tmp_path / "both") == folder


def test_a_model_beside_safetensors_has_to_be_given(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model")
    file = write_gguf(checkpoint, checkpoint / "x.gguf")
    assert locate_model(checkpoint) == checkpoint
    device = torch.device("cpu")
    with (
        pytest.raises(ModelLoadError, match=rf"safetensors beside its GGUF files: .* {file}$"),
        open_weights(checkpoint, "gguf", "none", torch.float32, device),
    ):
        raise AssertionError("opened")


@given(st.text(min_size=1), st.integers(1, 50), st.data())
def test_every_part_names_all(name: str, count: int, data: st.DataObject) -> None:
    names = [shard_name(name, number, count) for number in range(1, count + 1)]
    part = data.draw(st.sampled_from(names))
    assert shard_names(part) == names and model_stem(part) == name


@pytest.mark.parametrize(
    "name", ["x.gguf", "x-00004-of-00003.gguf", "x-00000-of-00000.gguf", "x-1-of-2.gguf", "x"]
)
def test_other_names_stand_for_themselves(name: str) -> None:
    assert shard_names(name) == [name]
