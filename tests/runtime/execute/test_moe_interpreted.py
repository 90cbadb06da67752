"""Models with experts and latent attention on `--device cuda` in Triton's interpreter.

Few tokens in few layers, as in test_gpu_interpreted.py: prompts in chunks beside decodes, a shared
prefix, and captured steps, whose padding chooses no expert. What is allocated holds NaN and the
largest integers, so that whatever was not written shows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeListener
from mixtures import make_mixture
from torch import Tensor

from stemma.kernels.model_options import RoutingOptions
from stemma.kernels.triton import routing
from stemma.kernels.triton.routing import route_experts
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.asynchronous import AsynchronousSteps
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

TEXT = list(range(40, 70))
SMALL = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16}
GROUPED = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "Mixtral": {**GROUPED, "num_hidden_layers": 1},
    "Qwen3Moe": {**GROUPED, "num_hidden_layers": 1, "norm_topk_prob": True},
    "GptOss": {**GROUPED, "num_hidden_layers": 2, "sliding_window": 7},
    "DeepseekV3": {**SMALL, "v_head_dim": 8},
}
OPS = ("route_experts", "experts", "store_latent", "latent_attention")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of padding each call had that chose experts for any: they choose none."""
    counts: list[int] = []

    def checked(
        logits: Tensor,
        selection_bias: Tensor | None,
        options: RoutingOptions,
        num_tokens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        expert_ids, weights = route_experts(logits, selection_bias, options, num_tokens)
        assert num_tokens is not None and not logits.isnan().any()
        end = int(num_tokens)
        assert expert_ids[:end].min() >= 0 and expert_ids.max() < logits.shape[1]
        assert (expert_ids[end:] == -1).all()
        if end < len(logits):
            counts.append(len(logits) - end)
        return expert_ids, weights

    monkeypatch.setattr(routing, "route_experts", checked)
    return counts


@pytest.mark.usefixtures("poisoned")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy, about NaN
@pytest.mark.parametrize("family", [name for name in SHAPES if name != "Qwen3Moe"])  # it is below
def test_kernels_for_a_gpu_say_what_the_cpu_says(
    family: str, tmp_path: Path, padding: list[int]
) -> None:
    make_mixture(tmp_path, family, has_tokenizer=True, init_std=0.4, **SHAPES[family])
    expected = serve(load(tmp_path))
    loaded = load(tmp_path, device="cuda", cuda_graph_max_tokens=8)
    used = {choice.op: choice.implementation for choice in loaded.runner.kernels.describe()}
    assert {op: used[op] for op in OPS} == dict.fromkeys(OPS, "triton")
    found = serve(loaded)
    assert len({tuple(request.output_ids) for request in expected}) == len(expected)
    for request, truth in zip(found, expected, strict=True):
        assert request.error is None and request.output_ids == truth.output_ids
        assert request.scores == pytest.approx(truth.scores, abs=1e-4)
    steps = loaded.runner.steps
    assert isinstance(steps, AsynchronousSteps) and steps.forward.num_graphs > 0
    assert padding, "no padding was tested"
    num_tokens = loaded.engine.scheduler.stats.num_computed_tokens
    experts = loaded.model_config.experts
    assert experts is not None
    for counts in loaded.runner.describe_experts()["loads"].values():  # padding chooses none
        assert sum(counts) == num_tokens * experts.routing.num_chosen


def test_quantized_experts_say_what_the_cpu_says(tmp_path: Path) -> None:
    sizes = {**SHAPES["Qwen3Moe"], "moe_intermediate_size": 32}
    make_mixture(tmp_path, "Qwen3Moe", has_tokenizer=True, init_std=0.4, **sizes)
    floating, expected, found = (
        serve(load(tmp_path, cuda_graph_max_tokens=0, **options))
        for options in ({}, {"quantization": "int4"}, {"quantization": "int4", "device": "cuda"})
    )
    for request, truth in zip(found, expected, strict=True):
        assert request.error is None and request.output_ids == truth.output_ids
        assert request.scores == pytest.approx(truth.scores, abs=1e-4)
    assert expected[-1].scores != pytest.approx(floating[-1].scores, abs=1e-3)


def test_selected_keys_say_what_the_cpu_says(tmp_path: Path) -> None:
    """In steps that are captured as long as no query has more keys than are selected."""
    sizes = {**SHAPES["DeepseekV3"], "index_topk": 11}
    make_mixture(tmp_path, "DeepseekV32", has_tokenizer=True, init_std=0.4, **sizes)
    expected = serve(load(tmp_path))
    loaded = load(tmp_path, device="cuda", cuda_graph_max_tokens=8)
    for request, truth in zip(serve(loaded), expected, strict=True):
        assert request.error is None and request.output_ids == truth.output_ids
        assert request.scores == pytest.approx(truth.scores, abs=1e-4)
    steps = loaded.runner.steps
    assert isinstance(steps, AsynchronousSteps) and steps.forward.num_graphs > 0


def load(folder: Path, **options: Any) -> LoadedModel:
    config = EngineConfig(
        model=folder, dtype="float32", max_total_tokens=96, max_model_len=48, page_size=4,
        max_running_requests=8, chunked_prefill_size=16, **options,
    )  # fmt: skip
    return LoadedModel(config)


def serve(loaded: LoadedModel) -> list[Request]:
    engine = loaded.engine
    engine.scheduler.segment_cost_tokens = 0  # whatever is shared is a segment
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    asked: list[tuple[list[int], Scoring | None]] = [
        (TEXT[:14], None),
        ([*TEXT[:9], 5], None),
        ([*TEXT[:9], 7], None),
        (TEXT[:9], Scoring(6, (*TEXT[7:9], 65))),
    ]
    requests = [
        Request(
            engine.next_request_id(), array("i", prompt), sampling, FakeListener(), scoring=scoring
        )
        for prompt, scoring in asked
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.stats.num_shared_tokens > 0, "no segments were tested"
    return requests
