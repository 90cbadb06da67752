"""What users type for a model: folders, files and hub ids, through the hub's real client."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants as hub_constants
import pytest
from fake_hub import COMMIT, OLDER_COMMIT, FakeHub, ask_only, fake_hub

from stemma.cli.connect import engine_options
from stemma.errors import InvalidRequest, ModelLoadError
from stemma.frontend.client.engine_process import (
    FETCH_TIMEOUT_S,
    START_TIMEOUT_S,
    start_timeout_s,
)
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL, locate_model
from stemma.runtime.config import EngineConfig, add_engine_flags, located

SAFE = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"hi",
    "1_Pooling/config.json": b"{ }",
    "model.safetensors": b"weights" * 1000,
    # not wanted
    "tokenizer.model": b"sentencepiece",
    "README.md": b"#",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"again",
    "original/model.safetensors": b"and again",
    "model.gguf": b"GGUF",
}
WANTED = {
    "config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json",
    "model.safetensors",
}  # fmt: skip
MODELS = {
    "org/safe": SAFE,
    "org/pickled": {"config.json": b"{}", "pytorch_model-1.bin": b"pickle"},
    "org/x-gguf": {"x.Q4_K_M.gguf": b"GGUF", "README.md": b"#"},
    "org/parts": {f"q/x-{number:05}-of-00003.gguf": b"GGUF%d" % number for number in (1, 2, 3)},
    "org/bare": {
        "config.json": b"{}",
        "consolidated.safetensors": b"x",
        "q/model.safetensors": b"x",
    },
    "org/gated": SAFE,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(MODELS, gated=frozenset({"org/gated"})) as hub:
        ask_only(hub, tmp_path, monkeypatch)
        yield hub


def names_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate_model(tmp_path) == tmp_path
    assert locate_model(str(tmp_path)) == tmp_path


def test_the_embedded_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_model("stemma-tiny") == EMBEDDED_MODEL
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stemma-tiny").mkdir()
    assert locate_model("stemma-tiny") == Path("stemma-tiny")


def test_a_hub_id_fetches_weights_and_texts_and_nothing_else(hub: FakeHub) -> None:
    seen: list[tuple[int, int]] = []
    folder = locate_model("org/safe", on_progress=lambda *at: seen.append(at))
    assert names_in(folder) == WANTED
    assert (folder / "model.safetensors").read_bytes() == SAFE["model.safetensors"]
    assert seen[-1][0] == seen[-1][1] == sum(len(SAFE[name]) for name in WANTED)


def test_what_is_in_the_cache_is_not_fetched_again(hub: FakeHub) -> None:
    folder = locate_model("org/safe")
    num_fetched = len(hub.fetched)
    assert locate_model("org/safe") == folder and len(hub.fetched) == num_fetched == len(WANTED)


@pytest.mark.parametrize("revision", ["v1", OLDER_COMMIT])
def test_a_revision_is_pinned_in_the_id_or_beside_it(hub: FakeHub, revision: str) -> None:
    assert locate_model("org/safe").name == COMMIT
    folder = locate_model(f"org/safe@{revision}")
    assert folder.name == OLDER_COMMIT
    assert locate_model("org/safe", revision=revision) == folder
    with pytest.raises(InvalidRequest, match=r"revision='main' is not allowed"):
        locate_model(f"org/safe@{revision}", revision="main")


def test_an_unknown_revision_is_named(hub: FakeHub) -> None:
    with pytest.raises(ModelLoadError, match="org/safe has no revision 'v9' on the hub"):
        locate_model("org/safe@v9")


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"revision='v1'.*no hub id"):
        locate_model(tmp_path, revision="v1")


def test_the_cache_serves_where_the_hub_is_gone(hub: FakeHub) -> None:
    folder = locate_model("org/safe")
    hub.shutdown()
    hub.server_close()
    assert locate_model("org/safe") == folder
    with pytest.raises(ModelLoadError, match=r"Connect.*give a folder, or run once online"):
        locate_model("org/pickled")


def test_offline_nothing_is_asked_and_the_cache_serves(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = locate_model("org/safe")
    num_fetched = len(hub.fetched)
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    assert locate_model("org/safe") == folder and len(hub.fetched) == num_fetched
    match = (
        r"org/pickled is no folder here, not in the hub's cache \(.*cache\).*HF_HUB_OFFLINE is set"
    )
    with pytest.raises(ModelLoadError, match=match):
        locate_model("org/pickled")


def test_a_gated_model_says_how_to_get_in_and_takes_the_token(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    match = r"gated: accept its terms at https://huggingface.co/org/gated, then set HF_TOKEN"
    with pytest.raises(ModelLoadError, match=match):
        locate_model("org/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert names_in(locate_model("org/gated")) == WANTED
    assert "Bearer hf_secret" in hub.tokens


@pytest.mark.parametrize("model", ["org/nothing", "no-such-model"])
def test_what_is_neither_here_nor_there_is_said_so(hub: FakeHub, model: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{model} is neither a folder here nor a model on"):
        locate_model(model)


@pytest.mark.parametrize(
    "model",
    ["./x", "/no/such", "~/nothing-here", "~nobody/x", "a/b/c", "x y", "x.gguf", "", "x/" * 99],
)  # fmt: skip
def test_a_missing_path_is_never_looked_for_on_the_hub(hub: FakeHub, model: str) -> None:
    with pytest.raises(ModelLoadError, match="does not exist; give a folder"):
        locate_model(model)
    assert not hub.fetched


def test_pickled_weights_are_refused_with_the_reason(hub: FakeHub, tmp_path: Path) -> None:
    match = r"org/pickled has its weights as PyTorch pickles only \(pytorch_model-1.bin\).*run code"
    with pytest.raises(ModelLoadError, match=match):
        locate_model("org/pickled")
    assert not any(name.endswith(".bin") for name in hub.fetched)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match="pickles only"):
        locate_model(file)


def test_a_model_of_gguf_files_asks_which(hub: FakeHub) -> None:
    match = r"holds GGUF files: name one, as in org/x-gguf/x.Q4_K_M.gguf"
    with pytest.raises(ModelLoadError, match=match):
        locate_model("org/x-gguf")


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("org/pickled", "as PyTorch pickles only"),
        ("org/x-gguf", "holds GGUF files: name one"),
        ("org/bare", r"org/bare holds no safetensors"),
        ("org/x-gguf/x.Q4_K_M.gguf", r"^org/x-gguf/x\.Q4_K_M\.gguf: version: expected 4 bytes"),
        ("org/x-gguf/y.gguf", r"org/x-gguf/y\.gguf is not among the files"),
        ("org/x-gguf/x.Q4_K_M.gguf@v9", "org/x-gguf has no revision 'v9' on the hub"),
    ],
)
def test_what_could_not_be_loaded_is_not_described(
    hub: FakeHub, tmp_path: Path, model: str, match: str
) -> None:
    with pytest.raises(ModelLoadError, match=match):
        locate_model(model, describe_in=tmp_path)


def test_a_model_is_described_without_its_weights(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = locate_model("org/safe", describe_in=tmp_path)
    assert names_in(folder) == WANTED - {"model.safetensors"}
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    assert locate_model("org/safe", describe_in=tmp_path) == folder
    with pytest.raises(ModelLoadError, match=r"not in the hub's cache.*HF_HUB_OFFLINE is set"):
        locate_model("org/safe")


@pytest.mark.parametrize("is_offline", [True, False])
def test_weights_that_are_not_in_the_cache_are_said_so(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_offline: bool
) -> None:
    """In a cache that does not say what else the model has."""
    model = tmp_path / "cache" / "models--org--safe"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", is_offline)
    if not is_offline:
        hub.shutdown()
        hub.server_close()
    assert locate_model("org/safe", describe_in=tmp_path).name == COMMIT
    cause = "HF_HUB_OFFLINE is set" if is_offline else "Connect"
    match = rf"the weights of org/safe are not in the hub's cache \(.*cannot be reached: {cause}"
    with pytest.raises(ModelLoadError, match=match):
        locate_model("org/safe")


def test_a_gguf_file_that_a_model_has_not_is_named(hub: FakeHub) -> None:
    with pytest.raises(ModelLoadError, match=r"org/x-gguf/y\.gguf is not among the files"):
        locate_model("org/x-gguf/y.gguf")


def test_all_parts_of_a_gguf_file_are_fetched(hub: FakeHub) -> None:
    with pytest.raises(ModelLoadError, match=r"x-00001-of-00003\.gguf: version"):
        locate_model("org/parts/q/x-00002-of-00003.gguf")
    assert {name.partition("/")[2] for name in hub.fetched} == set(MODELS["org/parts"])


def test_other_files_are_refused(tmp_path: Path) -> None:
    shard = tmp_path / "model-1.safetensors"
    shard.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=f"give its folder, {tmp_path}"):
        locate_model(shard)
    notes = tmp_path / "notes.txt"
    notes.write_text("")
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        locate_model(notes)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/Model-1B", "Model-1B"),
        ("org/Model-1B@v1.0", "Model-1B"),
        ("org/Model-GGUF/model.Q4_0.gguf", "model.Q4_0"),
        ("org/Model-GGUF/q4/model.Q4_0-00002-of-00003.gguf", "model.Q4_0"),
        (EMBEDDED_MODEL, "stemma-tiny"),
    ],
)
def test_the_served_name_is_the_models(model: str | Path, name: str) -> None:
    assert EngineConfig(model=model).model_name == name
    assert EngineConfig(model=model, served_model_name="mine").model_name == "mine"


def test_the_name_of_a_hub_id_stays_once_it_is_located(hub: FakeHub) -> None:
    config = located(EngineConfig(model="org/safe", revision="v1"))
    assert Path(config.model).name == OLDER_COMMIT and config.model_name == "safe"
    assert located(config) == config


def test_a_command_hands_the_folder_to_its_engine(hub: FakeHub) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    options = engine_options(parser.parse_args(["--model", "org/safe", "--revision", "v1"]))
    assert Path(options["model"]).name == OLDER_COMMIT
    assert options["served_model_name"] == "safe" and "revision" not in options
    assert engine_options(parser.parse_args([])) == {}


def test_an_engine_is_given_time_to_fetch(tmp_path: Path) -> None:
    assert start_timeout_s(None) == start_timeout_s(tmp_path) == START_TIMEOUT_S
    assert start_timeout_s("org/safe") == FETCH_TIMEOUT_S


def test_an_engine_starts_from_a_hub_id(tmp_path: Path) -> None:
    """In processes of their own, whose environment says where the hub and its cache are."""
    files = {file.name: file.read_bytes() for file in EMBEDDED_MODEL.iterdir()}
    code = (
        "import stemma as st\n"
        "with st.Engine('org/tiny@v1', max_total_tokens=256) as engine:\n"
        "    info = engine.get_server_info()\n"
        "    print(info['model'], info['model_path'])"
    )
    with fake_hub({"org/tiny": files}) as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    name, path = done.stdout.split()
    assert name == "tiny" and Path(path).name == OLDER_COMMIT and tmp_path in Path(path).parents
