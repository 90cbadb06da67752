"""A model's revision changes with its weights, and with nothing that does not matter."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stemma.runtime.checkpoint.config.rope_scaling import RopeKind, RopeScaling
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.checkpoint.safetensors.revision import model_revision, text_revision
from stemma.runtime.checkpoint.safetensors.safetensors_header import open_header
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


def changed(file: Path, offset: int) -> None:
    """One bit is another one; size and time are the same."""
    about, data = file.stat(), bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def test_it_changes_with_each_tensor_though_size_and_time_are_the_same(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    descriptor, places = open_header(file)
    os.close(descriptor)
    found = {revision(folder)}
    for place in places.values():
        changed(file, place.start + place.num_bytes // 2)
        found.add(revision(folder))
    assert len(found) == 1 + len(places)


@pytest.mark.parametrize("place", [0.0, 0.999999])
def test_it_changes_with_other_formats(tmp_path: Path, place: float) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(100_000))
    before = revision(tmp_path)
    changed(file, int(100_000 * place))
    assert revision(tmp_path) != before


def test_copies_have_the_same_and_configurations_their_own(folder: Path) -> None:
    before = revision(folder)
    (file,) = folder.glob("*.safetensors")
    os.utime(file, ns=(1, 1))
    assert revision(folder) == before
    assert model_revision(folder, replace(CONFIG, rope_theta=5.0), 100) != before


def test_texts_have_a_revision_of_their_own(folder: Path) -> None:
    before = text_revision(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert text_revision(folder) != before and len(before) == 32


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
