"""GGUF files of the hub by their headers: described as whole ones are, and hardly fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest
from caches import own_cache
from checkpoints import make_checkpoint
from fake_hub import COMMIT, FakeHub, ask_only, fake_hub
from gguf_files import Kind, write_gguf
from waiting import PATIENCE_S

from stemma.cli.model_report import examine_model
from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.location import locate_model

REPO = "org/x-gguf"
WIDE = {"hidden_size": 768, "intermediate_size": 3072}  # several blocks of bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GGUF file, whole and in parts."""
    folder = tmp_path_factory.mktemp("gguf")
    checkpoint = make_checkpoint(folder / "checkpoint", **WIDE)
    (folder / "files" / "q").mkdir(parents=True)
    write_gguf(checkpoint, folder / "files" / "x.gguf", Kind.Q8_0)
    write_gguf(checkpoint, folder / "files" / "q" / "x.gguf", split_max_tensors=11)
    return folder / "files"


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    files = {str(file.relative_to(model)): file.read_bytes() for file in model.rglob("*.gguf")}
    own_cache(monkeypatch, tmp_path / "cache")
    with fake_hub({REPO: files}) as hub:
        ask_only(hub, tmp_path, monkeypatch)
        yield hub


def report(folder: Path) -> dict[str, object]:
    return examine_model("x", folder, "float32", 10**9, is_gpu=False)


@pytest.mark.parametrize("name", ["x.gguf", "q/x-00002-of-00002.gguf"])
def test_it_is_described_as_the_whole_file_is(
    hub: FakeHub, model: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "scratch").mkdir()
    folder = locate_model(f"{REPO}/{name}", describe_in=tmp_path / "scratch")
    whole = locate_model(model / name)
    assert report(folder) == report(whole)
    for each in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (folder / each).read_bytes() == (whole / each).read_bytes()
    size = sum(file.stat().st_size for file in (model / name).parent.glob("*.gguf"))
    assert 0 < hub.num_bytes_sent < size / 2


def test_nothing_is_kept_for_a_model_that_is_loaded_later(
    hub: FakeHub, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    folder = locate_model(f"{REPO}/x.gguf", describe_in=tmp_path / "scratch")
    assert folder.is_relative_to(tmp_path / "scratch")
    assert not [file for file in tmp_path.rglob("*.gguf") if not file.is_relative_to(folder.parent)]
    loaded = locate_model(f"{REPO}/x.gguf")
    assert (loaded / "model.gguf").read_bytes() == (model / "x.gguf").read_bytes()


def test_one_that_is_in_the_cache_is_not_asked_for(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = locate_model(f"{REPO}/x.gguf")
    fetched = list(hub.fetched)
    described = locate_model(f"{REPO}/x.gguf", describe_in=tmp_path)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    assert report(described) == report(whole)
    assert report(locate_model(f"{REPO}/x.gguf", describe_in=tmp_path)) == report(whole)
    assert hub.fetched == fetched == [f"{COMMIT}/x.gguf"]


def test_offline_it_is_said_to_be_out_of_reach(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    match = rf"{REPO}/x\.gguf is no folder here, not in the hub's cache.*HF_HUB_OFFLINE is set"
    with pytest.raises(ModelLoadError, match=match):
        locate_model(f"{REPO}/x.gguf", describe_in=tmp_path)


def test_the_doctor_reads_headers(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-m", "stemma", "doctor", f"{REPO}/x.gguf", "--json"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    expected = report(locate_model(model / "x.gguf"))
    told = json.loads(done.stdout)
    for field in ("architecture", "parameters", "stored"):
        assert told[field] == expected[field]
    assert hub.num_bytes_sent < (model / "x.gguf").stat().st_size / 2
    assert not list(scratch.iterdir())
