"""Drafts by what reads the model's hidden states, a layer for multi-token prediction or an EAGLE
head: what transformers' layers compute in its place, and outputs that do not depend on it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from draft_heads import with_eagle, with_eagle3, with_medusa, with_predictor
from exactness_jobs import JOBS, Job, Load, loading, outputs_of, said_alone, serve
from preemptions import admit_all
from safetensors.torch import load_file, save_file
from scripted_drafters import verify_all

from stemma.errors import InvalidRequest, ModelLoadError
from stemma.runtime.config import EngineConfig
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.speculate.guesses import ModelDrafter, ModelText

NUM_GUESSES = 3


class Reference(Protocol):
    """What a head guesses, computed elsewhere."""

    def guesses(self, token_ids: Sequence[int], num_guesses: int) -> list[int]: ...


MADE: dict[str, Callable[[Path], Reference]] = {
    **{
        family: partial(with_predictor, family=family)
        for family in ("DeepseekV3", "Glm4Moe", "Ernie4_5_Moe", "Qwen3Next", "Qwen3_5", "MiMo")
    },
    "eagle": with_eagle,
    "eagle of two layers": partial(with_eagle, num_layers=2),
    "eagle3": with_eagle3,
    "eagle3 speculator": partial(with_eagle3, is_speculator=True),
    "medusa": with_medusa,
}
OF_EACH_KIND = ("DeepseekV3", "Qwen3Next", "eagle of two layers", "eagle3 speculator", "medusa")


@pytest.fixture(scope="module", params=MADE)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Reference]:
    folder = tmp_path_factory.mktemp("made")
    return folder, MADE[request.param](folder)


@pytest.fixture(scope="module")
def load(made: tuple[Path, Reference]) -> Iterator[Load]:
    yield from loading(made[0])


def drafting(load: Load, folder: Path, **options: Any) -> LoadedModel:
    head = folder / "head"
    draft_model = str(head) if head.exists() else "mtp"
    loaded = load(draft_model=draft_model, draft_candidates=2, speculate="model,grammar", **options)
    assert loaded.engine.scheduler.speculation is not None
    verify_all(loaded.engine.scheduler.speculation)
    return loaded


@pytest.mark.parametrize("chunk", [2048, 7])
def test_guesses_are_those_of_the_published_form(
    load: Load, made: tuple[Path, Reference], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each token of an output, also where prompts come in chunks."""
    job = next(job for job in JOBS["greedy"] if len(job.prompt) == 90)
    offered: list[list[int]] = []
    monkeypatch.setattr(
        ModelDrafter, "num_ahead", lambda _, texts, curve, room, *__: [min(NUM_GUESSES, room)]
    )
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)
    offer = ModelText.offer

    def noted(text: ModelText, tokens: Sequence[int], *others: Any) -> None:
        offered.append(list(tokens))
        offer(text, tokens, *others)

    monkeypatch.setattr(ModelText, "offer", noted)
    loaded = drafting(load, made[0], chunked_prefill_size=chunk)
    (output,) = outputs_of(serve(loaded, [job]))
    assert offered
    at = 1  # how much of the output was there at each offer: one step, one token more
    for tokens in offered:
        wanted = made[1].guesses([*job.prompt, *output[:at]], len(tokens))
        assert tokens == wanted
        at += 1 + _num_right(tokens, output[at:])
    assert at <= len(output)


def _num_right(tokens: Sequence[int], output: Sequence[int]) -> int:
    num = 0
    while num < min(len(tokens), len(output)) and tokens[num] == output[num]:
        num += 1
    return num


KINDS = ("greedy", "sampled", "constrained")
CIRCUMSTANCES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (1, 2048, {}),
    (16, 23, {"host_kv_tokens": 512}),
    (1, 32, {"max_total_tokens": 160, "kernels": "cpu"}),
)


@pytest.mark.parametrize(
    ("made", "kind", "page_size", "chunk", "options"),
    [
        (made, KINDS[(number + turn) % 3], *circumstance)  # each pair of values once or more
        for number, made in enumerate(OF_EACH_KIND)
        for turn, circumstance in enumerate(CIRCUMSTANCES)
    ],
    indirect=["made"],
)
def test_tokens_are_identical_with_a_predictor(
    load: Load,
    made: tuple[Path, Reference],
    kind: str,
    page_size: int,
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(4)
    monkeypatch.setattr(
        ModelDrafter,
        "num_ahead",
        lambda _, texts, curve, room, *__: [
            rng.choice((0, rng.randrange(room + 1))) for _ in texts
        ],
    )
    monkeypatch.setattr(ModelDrafter, "pays", lambda *_: True)
    jobs: list[Job] = JOBS[kind]
    alone = said_alone(load, jobs)
    loaded = drafting(load, made[0], page_size=page_size, chunked_prefill_size=chunk, **options)
    if "max_total_tokens" in options:
        admit_all(monkeypatch, loaded.engine.scheduler)
    for _ in range(2):
        assert outputs_of(serve(loaded, jobs)) == alone
    assert loaded.engine.scheduler.stats.num_draft_tokens > 0


def test_a_model_without_a_predictor_is_refused(checkpoint: Path) -> None:
    with pytest.raises(InvalidRequest, match="LlamaForCausalLM has no layer for multi-token"):
        LoadedModel(EngineConfig(model=checkpoint, draft_model="mtp"))


def test_a_head_for_another_model_is_refused(
    checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("eagle")
    with_eagle(folder)
    config = json.loads((folder / "head" / "config.json").read_text())
    (folder / "head" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(InvalidRequest, match="its vocab_size is 300, that of Llama"):
        LoadedModel(EngineConfig(model=checkpoint, draft_model=str(folder / "head")))


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda config, _: config.update(target_hidden_size=128), "the model's hidden_size, 64"),
        (
            lambda config, _: config.update(hidden_size=32),
            "64, the model's, as it has no embed_tok",
        ),
        (lambda config, _: config.update(vocab_size=300), "the model's, 260, found 300"),
        (lambda config, _: config.update(num_hidden_layers=2), "it has 2 layers"),
        (lambda config, _: config.update(norm_output=True), "'norm_output': expected False"),
        (lambda config, _: config.update(draft_vocab_size=100), r"'d2t': expected I64 \[100\]"),
        (
            lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=[2, 3, 8]),
            r"3 integers in \[1, 7\], as the model has 7 layers",
        ),
        (lambda _, tensors: tensors.pop("d2t"), "tensor 'd2t' is missing: draft_vocab_size=200"),
        (lambda _, tensors: tensors.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        (lambda _, tensors: tensors.pop("fc.weight"), "'fc.weight' is missing"),
        (
            lambda _, tensors: tensors["d2t"].__setitem__(199, 61),
            r"199 of the head is 260 .* 260\)",
        ),
        (lambda _, tensors: tensors["d2t"].__setitem__(0, 300), "token 0 of the head is 300"),
        (lambda _, tensors: tensors["d2t"].zero_().__setitem__(1, -1), "two tokens of the head"),
    ],
    ids=lambda each: "" if callable(each) else each,
)
def test_an_eagle3_head_that_does_not_fit_is_refused_with_the_reason(
    eagle3: Path, tmp_path: Path, change: Change, answer: str
) -> None:
    head = shutil.copytree(eagle3 / "head", tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    change(config, tensors)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors, head / "model.safetensors")
    with pytest.raises((InvalidRequest, ModelLoadError), match=answer):
        LoadedModel(EngineConfig(model=eagle3, draft_model=str(head)))


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (
            lambda config, _: config.update(hidden_size=32),
            "'hidden_size': expected the model's, 64",
        ),
        (
            lambda config, _: config.update(vocab_size=300),
            "'vocab_size': expected the model's, 260",
        ),
        (lambda config, _: config.update(medusa_num_heads=4), "tensor '3.2.weight' is missing"),
        (lambda config, _: config.update(medusa_num_layers=1), "tensor '0.1.weight' is missing"),
        (lambda _, tensors: tensors.pop("1.0.linear.weight"), "'1.0.linear.weight' is missing"),
        (
            lambda _, tensors: tensors.update({"2.2.weight": torch.zeros(300, 64)}),
            r"expected shape \[260, 64\], as the model has, found \[300, 64\]",
        ),
    ],
    ids=lambda each: "" if callable(each) else each,
)
def test_medusas_heads_that_do_not_fit_are_refused_with_the_reason(
    tmp_path: Path, change: Change, answer: str
) -> None:
    with_medusa(tmp_path)
    head = tmp_path / "head"
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "medusa_lm_head.safetensors")
    change(config, tensors)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors, head / "medusa_lm_head.safetensors")
    with pytest.raises(ModelLoadError, match=answer):
        LoadedModel(EngineConfig(model=tmp_path, draft_model=str(head)))


def test_a_head_in_a_pickle_is_refused_with_what_converts_it(eagle3: Path, tmp_path: Path) -> None:
    head = shutil.copytree(eagle3 / "head", tmp_path / "head")
    torch.save(load_file(head / "model.safetensors"), head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"convert it once: python -c .*weights_only=True"):
        LoadedModel(EngineConfig(model=eagle3, draft_model=str(head)))


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_folder_that_is_no_head_and_no_model_is_refused_with_what_it_lacks(
    eagle3: Path, tmp_path: Path, is_renamed: bool
) -> None:
    head = shutil.copytree(eagle3 / "head", tmp_path / "head")
    tensors = {f"head.{n}": each for n, each in load_file(head / "model.safetensors").items()}
    (head / "model.safetensors").unlink()
    if is_renamed:
        save_file(tensors, head / "model.safetensors")
    found = "there are head.d2t, head.fc.weight, " if is_renamed else "there are no tensors"
    with pytest.raises(ModelLoadError, match=f"neither a model, .* has fc.weight .*; {found}"):
        LoadedModel(EngineConfig(model=eagle3, draft_model=str(head)))


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    with_eagle3(folder)
    return folder
