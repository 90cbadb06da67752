"""Scaled rotary embeddings against Hugging Face transformers, beyond the original length too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from step_plans import Feed, PlanDriver
from torch.utils._python_dispatch import TorchDispatchMode

from stemma.kernels.registry import select_kernels
from stemma.runtime.checkpoint.config.rope_scaling import RopeKind, RopeScaling
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.rotary import RotaryTable, inverse_frequencies
from stemma.runtime.models.model_config import read_model_config

ORIGINAL, LENGTH, HEAD_DIM = 32, 100, 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
CASES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn-attention-factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.8},
    "yarn-mscale": {"rope_type": "yarn", **YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn-betas": {"rope_type": "yarn", **YARN, "beta_fast": 8.0, "beta_slow": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0, 2.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
    },
    "yarn-exact-bounds": {"rope_type": "yarn", **YARN, "truncate": False},
}
TOKENS = torch.randint(0, 131, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = CASES[request.param]
    # Linear and dynamic configs state the length before scaling, the others that after it.
    is_stated_before = rope["rope_type"] in ("linear", "dynamic")
    return make_checkpoint(
        tmp_path_factory.mktemp(request.param),
        vocab_size=131,
        has_tokenizer=False,
        max_position_embeddings=ORIGINAL if is_stated_before else 4 * ORIGINAL,
        rope_parameters={"rope_theta": 1e4, **rope},
    )


def test_the_table_is_that_of_transformers(checkpoint: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    embedding = LlamaRotaryEmbedding(AutoConfig.from_pretrained(checkpoint))
    cos, sin = embedding(torch.zeros(1), torch.arange(LENGTH)[None])
    config = read_model_config(checkpoint)
    assert config.context_length == 4 * ORIGINAL
    device = torch.device("cpu")
    ours = RotaryTable(
        HEAD_DIM,
        LENGTH,
        config.rope_theta,
        config.rope_scaling,
        kernels=select_kernels(torch.float32),
        dtype=torch.float32,
        device=device,
    )
    own_cos, own_sin = ours.at(torch.arange(LENGTH))
    half = HEAD_DIM // 2
    # Dynamic: transformers computes the base from a float32 length.
    for own, theirs in (own_cos, cos[0]), (own_sin[..., half:], sin[0, :, half:]):
        torch.testing.assert_close(own[:, 0], theirs, atol=2e-5, rtol=0)
    torch.testing.assert_close(own_sin[:, 0, :half], -sin[0, :, :half], atol=2e-5, rtol=0)
    plain = inverse_frequencies(HEAD_DIM, config.rope_theta, None, LENGTH)
    scaled = inverse_frequencies(HEAD_DIM, config.rope_theta, config.rope_scaling, LENGTH)
    assert not torch.allclose(plain, scaled), "the case scales nothing"


def test_a_long_table_is_computed_in_blocks_to_the_same_numbers() -> None:
    """What is computed in float32 is small against the table, and rounded once."""
    scaling = RopeScaling(RopeKind.LINEAR, 4.0, 32, 32, attention_factor=0.8)
    length = 20_001

    class Largest(TorchDispatchMode):
        num_floats = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype is torch.float32:
                self.num_floats = max(self.num_floats, result.numel())
            return result

    with Largest() as largest:
        table = RotaryTable(
            6, length, 1e4, scaling, kernels=select_kernels(torch.bfloat16),
            dtype=torch.bfloat16, device=torch.device("cpu"),
        )  # fmt: skip
    assert largest.num_floats < length * 6 / 2
    angle = torch.arange(length).float()[:, None] * inverse_frequencies(6, 1e4, scaling, length)
    cos, sin = (angle.cos() * 0.8).bfloat16(), (angle.sin() * 0.8).bfloat16()
    own_cos, own_sin = table.at(torch.arange(length))
    assert torch.equal(own_cos[:, 0], torch.cat((cos, cos), -1))
    assert torch.equal(own_sin[:, 0], torch.cat((-sin, sin), -1))


@pytest.mark.parametrize("layout", ["transformers 4", "transformers 5"])
def test_logprobs_equal_transformers_beyond_the_original_length(
    checkpoint: Path, layout: str, tmp_path: Path
) -> None:
    folder = checkpoint if layout == "transformers 5" else _in_the_old_layout(checkpoint, tmp_path)
    expected = _hf_logprobs(checkpoint, TOKENS)[range(LENGTH - 1), TOKENS[1:]]
    for chunk in (LENGTH, 37):
        scores = _scores(_runner(folder, LENGTH), TOKENS, chunk)
        torch.testing.assert_close(torch.tensor(scores).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "max_positions"), [("dynamic", 1), ("longrope", 4)])
def test_an_engine_up_to_the_original_length_has_the_frequencies_of_short_texts(
    name: str, max_positions: int, tmp_path: Path
) -> None:
    """And above it a sequence's KV depends on the engine's length, never on its own.

    max_positions: in original lengths.
    """
    folder = make_checkpoint(
        tmp_path,
        vocab_size=131,
        has_tokenizer=False,
        max_position_embeddings=max_positions * ORIGINAL,
        rope_parameters={"rope_theta": 1e4, **CASES[name]},
    )
    short = TOKENS[:ORIGINAL]
    expected = _hf_logprobs(folder, short)[range(ORIGINAL - 1), short[1:]]
    scores = _scores(_runner(folder, ORIGINAL), short, ORIGINAL)
    torch.testing.assert_close(torch.tensor(scores).double(), expected, atol=1e-4, rtol=0)
    runner = _runner(folder, LENGTH)
    prefix = _scores(runner, short, ORIGINAL)
    assert prefix == pytest.approx(_scores(runner, TOKENS, LENGTH)[: ORIGINAL - 1], abs=1e-9)
    assert prefix != pytest.approx(scores, abs=1e-3)


def _in_the_old_layout(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint as transformers 4 wrote it, with `type` for `rope_type`."""
    config = json.loads((checkpoint / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    return folder


def _runner(folder: Path, max_model_len: int) -> ModelRunner:
    return ModelRunner(
        folder,
        read_model_config(folder),
        dtype="float64",
        kernels="reference",
        page_size=16,
        num_pages=16,
        max_running_requests=2,
        max_model_len=max_model_len,
    )


def _scores(runner: ModelRunner, tokens: list[int], chunk: int) -> list[float]:
    """Log probability of each token but the first."""
    driver = PlanDriver(runner)
    sequence, scores = driver.sequence(), []
    targets = [*tokens[1:], 0]
    for start in range(0, len(tokens), chunk):
        part = slice(start, start + chunk)
        (result,) = driver.step([Feed(sequence, tokens[part], targets=targets[part])])
        scores += result.target_logprobs
    return scores[:-1]


def _hf_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits.log_softmax(-1)
