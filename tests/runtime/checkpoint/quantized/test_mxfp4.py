"""gpt-oss as it is published: experts in MXFP4, which stay packed, all else floating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import change_config, make_mixture, pack_experts
from model_scores import scores
from safetensors.torch import load_file, save_file
from step_plans import PlanDriver
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stemma.errors import InvalidRequest, ModelLoadError
from stemma.kernels.quantized_tensors import QuantizedWeight
from stemma.kernels.reference.quantized import dequantize
from stemma.runtime.checkpoint.loader import open_weights
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.model_config import read_model_config

PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
TOKENS = [*PROMPT, 0]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
CPU = torch.device("cpu")


def make(folder: Path, **fields: Any) -> torch.Tensor:
    """A checkpoint, and what transformers says of TOKENS with its experts as floats."""
    model = make_mixture(folder, "GptOss", **SIZES, **fields)
    packed = pack_experts(folder)
    state = model.state_dict()
    for name in [name.removesuffix("_blocks") for name in packed if name.endswith("_blocks")]:
        blocks, scales = packed[f"{name}_blocks"], packed[f"{name}_scales"]
        state[name].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    with torch.inference_mode():
        logits = model.float()(torch.tensor([PROMPT])).logits[0]
    return logits.double().log_softmax(-1)[range(len(PROMPT)), TOKENS[1:]]


def runner(folder: Path, **options: Any) -> ModelRunner:
    settings = {"num_pages": 60, "max_running_requests": 8, "page_size": 4, **options}
    return ModelRunner(folder, read_model_config(folder), max_model_len=100, **settings)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_logprobs_equal_transformers_in_any_chunking(tmp_path: Path, kernels: str) -> None:
    expected = make(tmp_path)
    driver = PlanDriver(runner(tmp_path, dtype="float32", kernels=kernels))
    for chunks in ([len(TOKENS)], [1], [len(TOKENS), 7, 1, 16]):
        for logprobs in scores(driver, TOKENS, chunks):
            torch.testing.assert_close(logprobs, expected, atol=5e-5, rtol=0)


def test_bfloat16_with_what_is_compiled(tmp_path: Path) -> None:
    """Experts are exact, so that only activations are rounded."""
    expected = make(tmp_path, dtype=torch.bfloat16, init_std=0.1)
    (found,) = scores(PlanDriver(runner(tmp_path, dtype="bfloat16")), TOKENS, [7])
    assert (found - expected).abs().median() < 0.05


def test_experts_stay_in_four_bits(tmp_path: Path) -> None:
    make(tmp_path)
    packed = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with open_weights(tmp_path, "auto", "none", torch.float32, CPU) as source:
        weight = source.take_experts(name, 6, 192, 64)
        assert isinstance(source.take_weight(["lm_head"], [260], 64), torch.Tensor)
    assert isinstance(weight, QuantizedWeight)
    assert weight.values.nbytes == packed[f"{name}_blocks"].nbytes and weight.bits == 4
    expected = convert_moe_packed_tensors(
        packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32
    )
    assert torch.equal(dequantize(weight, torch.float32), expected.transpose(1, 2))


def test_what_is_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(InvalidRequest, match="quantized already"):
        runner(tmp_path, dtype="float32", quantization="int8")


def test_malformed_experts_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(file)
    bad = {
        f"{name}_scales": tensors[f"{name}_scales"].index_fill(0, torch.tensor([2]), 255),
        f"{name}_blocks": tensors[f"{name}_blocks"][:, :-1].contiguous(),
    }
    for tensor, value in bad.items():
        save_file({**tensors, tensor: value}, file)
        with pytest.raises(ModelLoadError, match=tensor):
            runner(tmp_path, dtype="float32")


def test_without_its_section_the_config_does_not_fit(tmp_path: Path) -> None:
    make(tmp_path)
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(
        ModelLoadError, match=r"gate_up_proj.*missing.*_blocks.*quantization_config"
    ):
        runner(tmp_path, dtype="float32")


def test_random_weights_of_its_config_alone(tmp_path: Path) -> None:
    """`--load-format dummy` holds what the checkpoint would."""
    make(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    driver = PlanDriver(runner(tmp_path, dtype="float32", load_format="dummy"))
    (logprobs,) = scores(driver, TOKENS, [7])
    assert logprobs.isfinite().all() and logprobs.std() > 0


@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4"])
def test_floating_experts_can_be_rounded_while_they_are_loaded(
    tmp_path: Path, quantization: str
) -> None:
    make_mixture(tmp_path, "GptOss", **SIZES)
    plain, expected, found = (
        scores(PlanDriver(runner(tmp_path, dtype="float32", **options)), TOKENS, [7])[0]
        for options in (
            {},
            {"kernels": "reference", "quantization": quantization},
            {"quantization": quantization},
        )
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (found - plain).abs().max() > 1e-3, "nothing was rounded"
