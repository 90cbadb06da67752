"""Weights in 8-bit floats with scales: exactly what the format says, and transformers of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import change_config, make_mixture
from model_scores import scores
from quantized_checkpoints import pack_fp8
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver

from stemma.cli.model_report import examine_model
from stemma.errors import ModelLoadError
from stemma.runtime.checkpoint.formats import stored_method
from stemma.runtime.checkpoint.loader import open_weights
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.model_config import read_model_config

PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
TOKENS = [*PROMPT, 0]
CPU = torch.device("cpu")
SIZES = {"moe_intermediate_size": 24}
# By name: the family, rows and columns of a block (none of a weight's sizes is a multiple of
# both), and the scales' dtype.
CASES: dict[str, tuple[str, tuple[int, int] | None, torch.dtype]] = {
    "deepseek_v3": ("DeepseekV3", (20, 28), torch.float32),
    "qwen3_moe-powers-of-two": ("Qwen3Moe", (128, 128), torch.float8_e8m0fnu),
    "minimax_m2-a-scale-each": ("MiniMaxM2", None, torch.bfloat16),
}


def runner(folder: Path, **options: Any) -> ModelRunner:
    settings = {"num_pages": 60, "max_running_requests": 8, "page_size": 4, **options}
    return ModelRunner(folder, read_model_config(folder), max_model_len=100, **settings)


@pytest.mark.parametrize("name", CASES)
def test_logprobs_equal_transformers_in_any_chunking(name: str, tmp_path: Path) -> None:
    family, block, dtype = CASES[name]
    model = make_mixture(tmp_path, family, is_sharded=family == "DeepseekV3")
    weights = pack_fp8(tmp_path, block, dtype)
    expected = logprobs(model, tmp_path, weights)
    driver = PlanDriver(runner(tmp_path, dtype="float32"))
    for chunks in ([len(TOKENS)], [1], [len(TOKENS), 7, 1, 16]):
        for found in scores(driver, TOKENS, chunks):
            torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)


def logprobs(
    model: torch.nn.Module, folder: Path, weights: dict[str, torch.Tensor]
) -> torch.Tensor:
    """What transformers says of TOKENS with these weights in place of its own."""
    transformers_model = type(model).from_pretrained(  # type: ignore[attr-defined]
        save_floating(folder, weights), attn_implementation="eager"
    )
    with torch.inference_mode():
        logits = transformers_model.float()(torch.tensor([PROMPT])).logits[0]
    found: torch.Tensor = logits.double().log_softmax(-1)[range(len(PROMPT)), TOKENS[1:]]
    return found


def save_floating(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    """The checkpoint with its weights dequantized, in a folder of its own."""
    plain = folder / "floating"
    plain.mkdir()
    (plain / "config.json").write_text((folder / "config.json").read_text())
    change_config(plain, quantization_config=None)
    stored = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    kept = {name: t for name, t in stored.items() if not name.endswith("_scale_inv")}
    save_file({**kept, **weights}, plain / "model.safetensors", {"format": "pt"})
    return plain


@pytest.mark.parametrize("block", [(128, 128), (16, 48), None])
def test_weights_are_the_numbers_times_their_scales(
    tmp_path: Path, block: tuple[int, int] | None
) -> None:
    """Parts of one product may be floating (`modules_to_not_convert`), and tails are no blocks."""
    make_mixture(tmp_path, "Qwen3Moe", hidden_size=200)
    weights = pack_fp8(tmp_path, block, torch.float32, kept=("k_proj", "lm_head"))
    names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
    stored = load_file(tmp_path / "model.safetensors")
    assert f"{names[1]}.weight" not in weights and f"{names[0]}.weight" in weights
    expected = torch.cat([weights.get(key, stored[key]) for key in (f"{n}.weight" for n in names)])
    for dtype in (torch.float32, torch.bfloat16):
        with open_weights(tmp_path, "auto", "none", dtype, CPU) as source:
            found = source.take_weight(names, [96, 48, 48], 200)
            alone = source.take(f"{names[0]}.weight", (96, 200))
        assert isinstance(found, torch.Tensor) and torch.equal(found, expected.to(dtype))
        assert torch.equal(alone, expected[:96].to(dtype))


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4"])
def test_they_can_be_rounded_as_floating_ones_are(tmp_path: Path, quantization: str) -> None:
    """From what they stand for, not from what `--dtype` makes of it."""
    model = make_mixture(tmp_path, "Qwen3Moe", moe_intermediate_size=32)
    weights = pack_fp8(tmp_path, (20, 28), torch.float32)
    options = {"dtype": "float32", "quantization": quantization}
    (found,) = scores(PlanDriver(runner(tmp_path, **options)), TOKENS, [9])
    (plain,) = scores(PlanDriver(runner(save_floating(tmp_path, weights), **options)), TOKENS, [9])
    assert torch.equal(found, plain)
    expected = logprobs(model, tmp_path / "floating", weights)
    assert (found - expected).abs().max() > 1e-3, "nothing was rounded"


def test_they_are_told_of_as_floating(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_mixture(tmp_path, "DeepseekV3")
    pack_fp8(tmp_path, (128, 128), torch.float32, has_input_scales=True)
    assert stored_method(tmp_path) is None
    report = examine_model("x", tmp_path, "bfloat16", 10**9, is_gpu=False)
    assert report["stored_quantization"] == "none"
    assert "F8_E4M3" in report["stored"]["formats"]
    assert [fit["quantization"] for fit in report["fits"]] == ["none", "int8", "w8a8", "int4"]
    runner(tmp_path, dtype="float32")
    assert "are not used" not in caplog.text
    (tmp_path / "model.safetensors").unlink()
    runner(tmp_path, dtype="float32", load_format="dummy")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda scale: None, "o_proj.weight_scale_inv"),
        (lambda scale: scale[:-1].contiguous(), "o_proj.weight_scale_inv.*blocks"),
        (lambda scale: scale.int(), "o_proj.weight_scale_inv.*floating point"),
    ],
    ids=["missing", "too-few", "integers"],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Any, named: str
) -> None:
    make_mixture(tmp_path, "Qwen3Moe")
    pack_fp8(tmp_path, (20, 28), torch.float32)
    file, name = tmp_path / "model.safetensors", "model.layers.1.self_attn.o_proj.weight_scale_inv"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, file)
    with pytest.raises(ModelLoadError, match=named):
        runner(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "section", [{"weight_block_size": [128]}, {"weight_block_size": [0, 128]}, {"fmt": "e5m2"}]
)
def test_what_the_section_may_say(tmp_path: Path, section: dict[str, Any]) -> None:
    make_mixture(tmp_path, "Qwen3Moe")
    change_config(tmp_path, quantization_config={"quant_method": "fp8", **section})
    with pytest.raises(ModelLoadError, match=next(iter(section))):
        runner(tmp_path, dtype="float32")


def test_without_its_section_the_config_does_not_fit(tmp_path: Path) -> None:
    make_mixture(tmp_path, "Qwen3Moe")
    pack_fp8(tmp_path, (128, 128), torch.float32)
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelLoadError, match=r"float8_e4m3fn.*quantization_config"):
        runner(tmp_path, dtype="float32")
