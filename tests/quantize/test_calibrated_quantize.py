"""`stemma quantize --calibrate`, from texts or programs to a checkpoint that is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from mixtures import make_mixture
from model_scores import make_runner, scores
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver

from stemma.cli.parser import run_command
from stemma.runtime.checkpoint.quantized.quantization_config import packed_config

NUM_TEXTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With inputs that are much larger than others, as those of trained models are."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("model"), hidden_size=128, intermediate_size=128, init_std=0.1
    )
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] *= 8
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("sky", "sea", "sun", "moon", "wind", "rain", "snow", "leaf")
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [
        {"text": " ".join(words[(index * step) % 8] for step in range(1, 12))}
        for index in range(NUM_TEXTS)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def quantize(
    capsys: pytest.CaptureFixture[str], model: Path, file: Path, out: Path, *more: str
) -> dict[str, Any]:
    given = [str(model), "--calibrate", str(file), "--out", str(out), "--json", *more]
    assert run_command(["quantize", *given]) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def test_each_method_writes_what_is_served_as_it_was_measured(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the more is known, the nearer the copy is to the original."""
    tokens = list(range(40, 90))
    exact = scores(PlanDriver(make_runner(model)), tokens, [50])[0]
    kls = {}
    for method, bits in (
        ("rtn", 4), ("gptq", 4), ("awq", 4), ("gptq", 3), ("gptq", 8), ("smoothquant", 8),
    ):  # fmt: skip
        out = tmp_path / f"{method}{bits}"
        summary = quantize(capsys, model, texts, out, "--method", method, "--bits", str(bits))
        kls[method, bits] = summary["kl"]
        config = packed_config(out)
        assert config is not None and config.bits == bits and config.rounds_rest
        assert config.activations == ("int8" if method == "smoothquant" else "exact")
        found = scores(PlanDriver(make_runner(out)), tokens, [50])[0]
        assert not torch.equal(found, exact)
        card = (out / "README.md").read_text()
        assert f"KL to the original | {summary['kl']:.4f}" in card and f"{bits} bits" in card
    assert 0 < kls["gptq", 8] < kls["gptq", 4] < kls["rtn", 4]
    assert kls["gptq", 4] < kls["gptq", 3]
    assert kls["awq", 4] < kls["rtn", 4]
    assert kls["smoothquant", 8] < kls["gptq", 4]


def test_programs_are_run_for_what_they_say(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    file = tmp_path / "prompts.jsonl"
    prompts = [f"The {noun} is" for noun in ("sky", "sea", "sun", "moon")]
    file.write_text("".join(json.dumps({"prompt": p, **options}) + "\n" for p in prompts))
    summary = quantize(
        capsys, model, file, tmp_path / "out", "--method", "gptq", "--held-out", "0.5"
    )
    each = [len(prompt) + 12 for prompt in prompts]
    assert summary["num_tokens"] + summary["num_held_tokens"] == sum(each)


@pytest.mark.parametrize(
    "line", ['{"prompt": 1}', '{"prompt": "?", "n": 0}'], ids=["no prompt", "what gen refuses"]
)
def test_a_line_that_is_wrong_is_named_as_calibrates(
    line: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "prompts.jsonl", str(tmp_path / "out")
    file.write_text(f"{line}\n")
    assert run_command(["quantize", str(model), "--calibrate", str(file), "--out", out]) == 1
    assert f"calibrate='{file}:1' is not allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "gptq"], "method='gptq' is not allowed; allowed: with --calibrate FILE"),
        (["--method", "smoothquant", "--bits", "4"], "bits=4 is not allowed; allowed: 8 of"),
        (["--bits", "3"], "bits=3 is not allowed; allowed: 4 or 8 of rtn, or --method gptq"),
        (["--strength", "2"], "strength=2.0 is not allowed; allowed: a number from 0 to 1"),
        (["--calibrate", "nowhere.py"], "calibrate='nowhere.py' is not allowed; allowed: an exist"),
    ],
)
def test_what_does_not_go_together_is_named(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["quantize", "--out", str(tmp_path / "out"), *flags]) == 1
    assert message in capsys.readouterr().err


def test_models_that_are_not_computed_so_are_refused_by_name(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_mixture(tmp_path / "mixture", "Mixtral")
    gemma = make_checkpoint(tmp_path / "gemma", "gemma2", num_layers=1)
    for model, method, message in (
        (tmp_path / "mixture", "gptq", "MixtralForCausalLM has experts"),
        (gemma, "awq", "for this model gptq or rtn"),
    ):
        given = [str(model), "--calibrate", str(texts), "--out", str(tmp_path / "out")]
        assert run_command(["quantize", *given, "--method", method]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
