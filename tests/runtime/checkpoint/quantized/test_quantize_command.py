"""`stemma quantize`: what it writes, loaded, is what --quantization gives; others can read it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caches import own_cache
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from mixtures import FAMILIES as MIXTURES
from mixtures import make_mixture
from model_scores import make_runner, scores
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver
from torch import Tensor

from stemma.cli.parser import run_command
from stemma.kernels.ops import Weight
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.runtime.checkpoint.loader import open_weights
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.checkpoint.quantized.quantized_copy import write_quantized_copy
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.models.model_tensors import model_tensors

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["tied", "untied and sharded"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    is_tied = request.param == "tied"
    folder = tmp_path_factory.mktemp("model")
    return make_checkpoint(
        folder,
        hidden_size=128,
        intermediate_size=96,  # groups of 32
        tie_word_embeddings=is_tied,
        is_sharded=not is_tied,
        init_std=0.05,
    )


def quantize(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert run_command(["quantize", *argv, "--json"]) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out)
    return summary


def copy(folder: Path, out: Path, bits: int, **options: Any) -> None:
    tensors = model_tensors(read_model_config(folder))
    write_quantized_copy(folder, out, tensors, bits=bits, version="0", **options)  # type: ignore[arg-type]


def weights_of(folder: Path, quantization: str) -> dict[str, Weight]:
    """Every weight as a Llama of these shapes takes it."""
    taken: dict[str, Weight] = {}

    def take(names: Sequence[str], sizes: Sequence[int], num_inputs: int) -> None:
        taken[names[0]] = source.take_weight(names, sizes, num_inputs)

    config = read_model_config(folder)
    with open_weights(folder, "auto", quantization, torch.bfloat16, CPU) as source:  # type: ignore[arg-type]
        table = source.take("model.embed_tokens.weight", (config.vocab_size, 128))
        taken["norm"] = source.take("model.norm.weight", (128,))
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            take([f"{layer}.self_attn.{part}_proj" for part in "qkv"], [128, 64, 64], 128)
            take([f"{layer}.self_attn.o_proj"], [128], 128)
            take([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [96, 96], 128)
            take([f"{layer}.mlp.down_proj"], [128], 96)
        if config.tie_word_embeddings:
            taken["lm_head"] = source.tie_weight(table)
        else:
            take(["lm_head"], [config.vocab_size], 128)
    return taken


def assert_equal(found: Weight, expected: Weight) -> None:
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and torch.equal(found, expected)
        return
    assert isinstance(found, QuantizedWeight)
    assert (found.bits, found.group_size) == (expected.bits, expected.group_size)
    assert torch.equal(found.values, expected.values)
    assert torch.equal(found.scales, expected.scales)
    zeros = torch.zeros_like(expected.scales)
    assert torch.equal(
        zeros if found.offsets is None else found.offsets,
        zeros if expected.offsets is None else expected.offsets,
    )


@pytest.mark.parametrize(("bits", "quantization"), [(4, "int4"), (8, "int8")])
def test_the_copy_loads_as_the_original_does_rounded(
    folder: Path, tmp_path: Path, bits: int, quantization: str
) -> None:
    copy(folder, tmp_path / "out", bits, shard_bytes=50_000)
    expected = weights_of(folder, quantization)
    found = weights_of(tmp_path / "out", "none")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert_equal(found[name], weight)


def test_what_the_layout_cannot_hold_is_rounded_in_the_same_groups(tmp_path: Path) -> None:
    """100 outputs of 4 bits fill no words of 32."""
    model = make_checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=100)
    copy(model, tmp_path / "out", 4, group_size=64)
    with open_weights(tmp_path / "out", "auto", "none", torch.float32, CPU) as source:
        gate = source.take_weight(["model.layers.0.mlp.gate_proj"], [100], 128)
    assert isinstance(gate, QuantizedWeight) and (gate.bits, gate.group_size) == (4, 64)


def test_in_awq_s_layout_it_has_the_same_numbers_in_groups_of_one_size(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default of 4 bits. Inputs of down_proj are a multiple of 32."""
    quantize(capsys, str(folder), "--out", str(tmp_path / "awq"))
    options = ("--group-size", "32", "--format", "gptq")
    quantize(capsys, str(folder), "--out", str(tmp_path / "gptq"), *options)
    section = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["version"]) == ("awq", "gemm")
    assert (section["group_size"], section["zero_point"]) == (32, True)
    assert "lm_head" in section["modules_to_not_convert"]
    expected = weights_of(tmp_path / "gptq", "none")
    found = weights_of(tmp_path / "awq", "none")
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert_equal(found[name], weight)


def test_awq_has_4_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quantize", "--out", "x", "--bits", "8", "--format", "awq"]) == 1
    assert "format='awq' is not allowed; allowed: gptq with 8 bits" in capsys.readouterr().err


def test_other_readers_find_gptq(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the format's own library, with numpy, from the layout's description."""
    summary = quantize(capsys, str(folder), "--out", str(tmp_path / "out"), "--format", "gptq")
    name = "model.layers.0.self_attn.k_proj"
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        packed, zeros, scales, groups = (
            file.get_tensor(f"{name}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
        )
    shifts = np.arange(8, dtype=np.uint32) * 4
    numbers = packed.view(np.uint32)[:, None, :] >> shifts[None, :, None] & 15
    numbers = numbers.reshape(128, 64).astype(np.float64)
    zeros = (zeros.view(np.uint32)[:, :, None] >> shifts & 15).reshape(1, 64).astype(np.float64)
    found = ((numbers - (zeros + 1)[groups]) * scales.astype(np.float64)[groups]).T
    (file_of,) = [
        path for path in sorted(folder.glob("*.safetensors"))
        if f"{name}.weight" in set(safe_open(path, "np").keys())
    ]  # fmt: skip
    with safe_open(file_of, "np") as file:
        weight = file.get_tensor(f"{name}.weight").astype(np.float64)
    error = np.linalg.norm(found - weight) / np.linalg.norm(weight)
    assert 0.05 < error < 0.13
    assert summary["errors"][name] == pytest.approx(error, rel=1e-3)
    assert summary["error_max"] == max(summary["errors"].values()) < 0.2


def test_the_copy_says_what_it_is_and_has_all_other_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out"
    summary = quantize(capsys, str(folder), "--out", str(out), "--format", "gptq")
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["bits"], section["group_size"]) == ("gptq", 4, 128)
    assert section["dynamic"] == {
        rf"+:^model\.layers\.{index}\.mlp\.down_proj$": {"group_size": 32} for index in range(2)
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    assert not list(out.glob("*.index.json")) and not list(out.parent.glob(".*"))
    assert summary["num_quantized"] == 14
    assert summary["bytes_after"] < 0.5 * summary["bytes_before"]
    size = (out / "model.safetensors").stat().st_size
    assert summary["bytes_after"] <= size <= summary["bytes_after"] + 10_000


def test_whoever_may_read_its_config_may_read_its_weights(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path / "out", 8)
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert len(modes) == 1


def test_shards_have_an_index(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path / "out", 8, shard_bytes=50_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2 and files == {
        file.name for file in (tmp_path / "out").glob("*.safetensors")
    }
    assert all(name.endswith(f"-of-{len(files):05}.safetensors") for name in files)


def test_nothing_is_overwritten_and_nothing_is_left_of_a_failure(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    assert run_command(["quantize", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert "a folder that does not exist yet" in capsys.readouterr().err
    broken = tmp_path / "broken"
    make_checkpoint(broken, num_layers=1, has_tokenizer=False)
    (file,) = broken.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])
    assert run_command(["quantize", str(broken), "--out", str(tmp_path / "new")]) == 1
    assert "not a readable safetensors file" in capsys.readouterr().err
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in (tmp_path / "link", broken / "config.json" / "out", tmp_path / ("x" * 300)):
        assert run_command(["quantize", str(folder), "--out", str(out)]) == 1
        assert "out=" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"out", "broken", "link"}


def test_a_checkpoint_that_lacks_a_tensor_is_not_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_checkpoint(tmp_path / "model", num_layers=1, has_tokenizer=False)
    tensors = load_file(model / "model.safetensors")
    for name, change, match in (
        ("model.layers.0.mlp.up_proj.weight", None, "is missing from the checkpoint"),
        ("model.norm.weight", None, "is missing from the checkpoint"),
        ("lm_head.weight", torch.ones(3, 64), r"expected shape \[260, 64\], found \[3, 64\]"),
    ):
        others = {each: tensor for each, tensor in tensors.items() if each != name}
        changed = others if change is None else {**others, name: change}
        save_file(changed, model / "model.safetensors")
        out = tmp_path / "deep" / "out"
        assert run_command(["quantize", str(model), "--out", str(out)]) == 1
        assert re.search(rf"tensor '{re.escape(name)}'.* {match}", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_linears_that_stay_are_named(tmp_path: Path) -> None:
    make_mixture(tmp_path / "model", "DeepseekV3")
    copy(tmp_path / "model", tmp_path / "out", 4)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    linears = model_tensors(read_model_config(tmp_path / "model")).linears
    floating = {name for name in linears if f"{name}.weight" in stored} - {"lm_head"}
    assert "model.layers.0.self_attn.kv_b_proj" in floating
    left_out = {key for key in section["dynamic"] if key.startswith("-:")}
    assert left_out == {f"-:^{re.escape(name)}$" for name in floating}


def test_a_copy_is_not_quantized_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize(capsys, "--out", str(tmp_path / "one"), "--bits", "8")
    assert run_command(["quantize", str(tmp_path / "one"), "--out", str(tmp_path / "two")]) == 1
    assert "is quantized already (gptq)" in capsys.readouterr().err


def test_gguf_is_refused_by_what_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_cache(monkeypatch, tmp_path / "cache")
    write_gguf(make_checkpoint(tmp_path / "model"), tmp_path / "x.gguf")
    for model in (f"{tmp_path}/x.gguf", str(tmp_path), "org/model/x.gguf", "org/model/x.gguf@v1"):
        assert run_command(["quantize", model, "--out", str(tmp_path / "out")]) == 1
        match = f"model='{model}' is not allowed; allowed: a checkpoint in safetensors, as the one"
        assert match in capsys.readouterr().err


def test_group_sizes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["quantize", "--out", "x", "--group-size", "48"]) == 1
    assert "group_size=48 is not allowed; allowed: one of (32, 64, 128)" in capsys.readouterr().err


def test_a_model_says_which_tensors_it_has_and_which_modules_are_linear() -> None:
    config = read_model_config(EMBEDDED_MODEL)
    tensors = model_tensors(config)
    assert len(tensors.linears) == 7 * config.num_layers
    assert tensors.linears["model.layers.0.mlp.down_proj"] == (
        config.hidden_size,
        config.intermediate_size,
    )
    stored = load_file(EMBEDDED_MODEL / "model.safetensors")
    assert tensors.shapes == {name: tuple(tensor.shape) for name, tensor in stored.items()}


def make_family(folder: Path, family: str) -> Path:
    if family in MIXTURES:
        make_mixture(folder, family)
        return folder
    return make_checkpoint(folder, family, has_tokenizer=False, tie_word_embeddings=True)


def runner_of(folder: Path, **options: Any) -> ModelRunner:
    return make_runner(folder, num_pages=20, kernels="reference", **options)


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma3", "phi3", "olmo2", "Mixtral", "Qwen2Moe", "DeepseekV3"]
)
def test_every_familys_copy_says_what_the_original_rounded_does(
    tmp_path: Path, family: str
) -> None:
    folder = make_family(tmp_path / "model", family)
    copy(folder, tmp_path / "copy", 4)
    tokens = list(range(40, 60))
    exact, rounded, copied = (
        scores(PlanDriver(runner), tokens, [7])[0]
        for runner in (
            runner_of(folder),
            runner_of(folder, quantization="int4"),
            runner_of(tmp_path / "copy"),
        )
    )
    assert torch.equal(copied, rounded) and not torch.allclose(rounded, exact)


@pytest.mark.parametrize("family", ["gemma2", "Mixtral", "DeepseekV2"])
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4"])
def test_dummy_weights_take_every_quantization(
    tmp_path: Path, family: str, quantization: str
) -> None:
    folder = make_family(tmp_path, family)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    runner = runner_of(folder, load_format="dummy", quantization=quantization)
    assert scores(PlanDriver(runner), [40, 41, 42], [3])[0].isfinite().all()


def test_dummy_weights_have_the_bits_of_the_checkpoint(tmp_path: Path) -> None:
    copy(EMBEDDED_MODEL, tmp_path / "copy", 4)
    for file in (tmp_path / "copy").glob("*.safetensors"):
        file.unlink()
    with open_weights(tmp_path / "copy", "dummy", "none", torch.float32, CPU) as source:
        weight = source.take_weight(["model.layers.0.mlp.up_proj"], [64], 128)
    assert isinstance(weight, QuantizedWeight) and weight.bits == 4
