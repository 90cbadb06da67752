"""Early exits: what they are held against, what becomes of a text, and the benchmark, tiny."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stemma.bench.speculation import early_exit
from stemma.bench.speculation.exits import Exit, exiting
from stemma.cli.parser import run_command
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.captured import CapturedForward
from stemma.runtime.loaded_model import LoadedModel
from stemma.training.recording import recording
from stemma.training.target import Target

NUM_LAYERS, NUM_FIRST = 6, 4  # of the embedded model; those that add something in `first_layers`
ENDINGS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The embedded model, whose last layers hand on what they get."""
    folder = shutil.copytree(EMBEDDED_MODEL, tmp_path_factory.mktemp("model") / "model")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(NUM_FIRST, NUM_LAYERS):
        for ending in ENDINGS:
            tensors[f"model.layers.{layer}.{ending}"].zero_()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    yield folder


def loaded_model(folder: Path) -> LoadedModel:
    return LoadedModel(EngineConfig(model=str(folder), speculate="off"))


def test_without_exits_it_is_the_decoder_to_the_bit() -> None:
    loaded = loaded_model(EMBEDDED_MODEL)
    ids = [*range(300, 360)]
    wanted = Target(loaded.runner).hidden(ids)
    loaded.runner.model = model = exiting(loaded)
    model.kept = []
    assert torch.equal(Target(loaded.runner).hidden(ids), wanted)
    assert model.kept[-1].shape == (NUM_LAYERS, len(ids), wanted.shape[1])
    assert torch.equal(model.normed(model.kept[-1][-1]), wanted)


def said(loaded: LoadedModel) -> list[int]:
    """The tokens of an answer."""
    sampling = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with recording(loaded) as (backend, _):
        answer = backend.generate("Ada lives in", sampling)
    assert isinstance(answer, dict)
    return list(answer["output_ids"])


def test_a_token_stops_at_the_first_exit_that_is_sure(first_layers: Path) -> None:
    """Where the layers behind it add nothing, the text is the whole model's."""
    size = 256

    def exit_of(bias: float) -> Exit:
        return Exit(torch.eye(size), torch.zeros(size), torch.zeros(size), torch.tensor([bias]))

    loaded = loaded_model(first_layers)
    wanted = said(loaded)
    loaded = loaded_model(first_layers)
    exits = [exit_of(-9.0)] * (NUM_FIRST - 1) + [exit_of(9.0)] * (NUM_LAYERS - NUM_FIRST)
    model = exiting(loaded, exits, 0.9)
    loaded.runner.steps.forward = CapturedForward(model, None)
    assert said(loaded) == wanted
    assert len(model.num_layers) == 11 and {*model.num_layers} == {NUM_FIRST}


def test_layers_that_add_nothing_know_what_the_last_knows(
    first_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_exit, "configure_threads", lambda *_: None)  # torch is loaded
    told = {"system": [], "facts": {}, "max_tokens": 12, "limits": [{}, {}]}
    cases = [
        {"skill": "chat", "user": [f"Hi, I am {name}.", "Who am I?"], "answers": ["?", "?"], **told}
        for name in ("Ada", "Max", "Livia", "Omar", "Ines", "Karl", "Rosa", "Emil")
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = ["bench", "early-exit", "--sure", "0.001", "1.0", "--out", str(tmp_path)]
    command += ["--model", str(first_layers), "--file", str(tmp_path / "cases.json")]
    assert run_command(command) == 0
    report = json.loads((tmp_path / "early-exit.json").read_text())
    lens = [row["lens"] for row in report["layers"]]
    assert lens[NUM_FIRST - 1 :] == [1.0] * (NUM_LAYERS - NUM_FIRST + 1)
    assert max(lens[: NUM_FIRST - 1]) < 1.0
    assert report["layers"][-1]["exit"] == 1.0, "the last layer agrees with itself"
    whole, early, never = report["rows"]
    for row in (whole, never):
        assert (row["layers"], row["weights"], row["same"]) == (NUM_LAYERS, 1.0, 1.0)
    assert early["layers"] < NUM_LAYERS and early["stopped"] > 0.0 and early["weights"] < 1.0
    assert whole["right"] == 0.0
