"""A model's revision changes with its weights, and with nothing that does not matter."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stemma.runtime.checkpoint.config.rope_scaling import RopeKind, RopeScaling
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.checkpoint.safetensors.revision import model_revision
from stemma.runtime.models.model_config import read_model_config

CONFIG = read_model_config(EMBEDDED_MODEL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


def revision(folder: Path) -> str:
    return model_revision(folder, CONFIG, 100)


def test_it_stays_over_time_and_with_other_files(folder: Path) -> None:
    before = revision(folder)
    (folder / "notes.txt").write_text("fine")
    assert revision(folder) == before and len(before) == 32


@pytest.mark.parametrize("place", [0.0, 0.999999])
def test_it_changes_with_the_weights_though_size_and_time_are_the_same(
    folder: Path, place: float
) -> None:
    before = revision(folder)
    (file,) = folder.glob("*.safetensors")
    about, data = file.stat(), bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert revision(folder) != before


def test_it_changes_with_a_files_time_and_with_the_configuration(folder: Path) -> None:
    before = revision(folder)
    (file,) = folder.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    touched = revision(folder)
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    assert len({before, touched, revision(folder)}) == 3


def test_the_models_length_counts_where_the_frequencies_depend_on_it(folder: Path) -> None:
    dynamic = replace(CONFIG, rope_scaling=RopeScaling(RopeKind.DYNAMIC, 2.0, 100, 200))
    assert model_revision(folder, dynamic, 100) != model_revision(folder, dynamic, 200)
    assert model_revision(folder, CONFIG, 100) == model_revision(folder, CONFIG, 200)


def test_it_tells_apart_the_files_that_a_folders_weights_are_read_from(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    found = {
        model_revision(folder, CONFIG, 100, load_format=load_format)
        for load_format in ("auto", "safetensors", "gguf")
    }
    assert len(found) == 3
