"""What tokens choose is counted, whatever steps they are in."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mixtures import make_mixture
from step_plans import GREEDY, Feed, PlanDriver
from torch import Tensor

from stemma.kernels.model_options import RoutingOptions
from stemma.kernels.registry import select_kernels
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.models.layers.expert_loads import imbalance_of
from stemma.runtime.models.model_config import read_model_config


@pytest.mark.parametrize("family", ["DeepseekV3", "Gemma4Moe", "Llama4"])
def test_each_layer_counts_what_its_router_chose(family: str, tmp_path: Path) -> None:
    """DeepSeek's first layer has no experts, and so every second one of Llama 4."""
    fields = {}
    if family == "Gemma4Moe":
        family = "Gemma4"
        fields = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}
        fields |= {"moe_intermediate_size": 40}
    make_mixture(tmp_path, family, **fields)
    config = read_model_config(tmp_path)
    assert config.experts is not None
    layers = config.experts.layers
    kernels = select_kernels(torch.float64, mode="reference")
    calls: list[Tensor] = []

    def noted(
        logits: Tensor, bias: Tensor | None, options: RoutingOptions, num_tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        expert_ids, weights = kernels.route_experts(logits, bias, options, num_tokens)
        calls.append(expert_ids)
        return expert_ids, weights

    runner = ModelRunner(
        tmp_path, config, dtype="float64", kernels=replace(kernels, route_experts=noted),
        num_pages=64, max_running_requests=4,
    )  # fmt: skip
    driver = PlanDriver(runner)
    one, other = driver.sequence(), driver.sequence()
    driver.step([Feed(one, range(9)), Feed(other, range(3))])
    driver.step([Feed(one, (4,), GREEDY), Feed(other, (5, 6), GREEDY)])
    assert len(calls) == 2 * len(layers)
    loads = runner.describe_experts()["loads"]
    for place, layer in enumerate(layers):
        chosen = Counter(torch.cat([ids.flatten() for ids in calls[place :: len(layers)]]).tolist())
        expected = [chosen[expert] for expert in range(config.experts.num_experts)]
        assert loads[str(layer)] == expected
        assert sum(expected) == 15 * config.experts.routing.num_chosen


def test_imbalance_is_the_largest_load_over_the_mean() -> None:
    assert imbalance_of([3, 1, 2, 2]) == 1.5
    assert imbalance_of([0, 0]) == imbalance_of([5, 5]) == 1.0
