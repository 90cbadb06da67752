"""GPTQ's act-order through whole models: equal to the weights dequantized by its definition.

weight[:, i] = scales[:, g_idx[i]] * (q[:, i] - zeros[:, g_idx[i]])
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from mixtures import make_mixture
from model_scores import make_runner, scores
from quantized_checkpoints import by_input, write_act_ordered
from step_plans import PlanDriver

TOKENS = list(range(40, 64))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Attention and feed-forward blocks whose parts are fused."""
    root = tmp_path_factory.mktemp("llama")
    return write_act_ordered(make_checkpoint(root / "model", hidden_size=64), root)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Each expert has an order of its own; one has a plain one."""
    root = tmp_path_factory.mktemp("mixtral")
    make_mixture(root / "model", "Mixtral", intermediate_size=64, has_tokenizer=True)
    return write_act_ordered(
        root / "model", root, lambda name: None if ".experts.2." in name else by_input(name)
    )


def score(folder: Path, dtype: str, kernels: str) -> torch.Tensor:
    runner = make_runner(folder, dtype=dtype, kernels=kernels)
    return scores(PlanDriver(runner), TOKENS, [7])[0]


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("dtype", "kernels", "tolerance"),
    [("float64", "reference", 1e-9), ("float32", "cpu", 1e-4), ("bfloat16", "auto", 0.5)],
)
def test_scores_are_those_of_the_weights_dequantized(
    request: pytest.FixtureRequest, model: str, dtype: str, kernels: str, tolerance: float
) -> None:
    packed, plain = request.getfixturevalue(model)
    found, expected = score(packed, dtype, kernels), score(plain, dtype, kernels)
    assert expected.std() > 0.5
    assert (found - expected).abs().max() < tolerance
