"""Models with recurrent layers on `--device cuda` in Triton's interpreter: prompts in chunks beside
decodes, prefixes whose states are copied, captured and padded steps, and drafts.

Few tokens in few layers. Cuts, copies and drafts of all kinds run through the same steps in float64
and without the interpreter's cost in test_recurrent_exactness.py ("queued").
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fakes import FakeListener
from mixtures import make_mixture
from scripted_drafters import ScriptedDrafter, oracle, speculate

from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.asynchronous import AsynchronousSteps
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.request import Request
from stemma.runtime.schedule.sampling_params import SamplingParams

TEXT = list(range(40, 90))
HEADS = {"num_key_value_heads": 1, "head_dim": 16}
DELTA = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def _lfm2(folder: Path) -> None:
    types = ["conv", "full_attention"]
    make_checkpoint(folder, "lfm2", num_layers=2, layer_types=types, init_std=0.3, seed=11)


def _mixture(family: str, **fields: Any) -> Callable[[Path], object]:
    fields = {**TWO, "num_attention_heads": 2, **fields}
    return partial(make_mixture, family=family, has_tokenizer=True, init_std=0.3, **fields)


MODELS: dict[str, Callable[[Path], object]] = {
    "lfm2": _lfm2,
    "qwen3_5": _mixture("Qwen3_5", **HEADS, **DELTA),
    "kimi_linear": _mixture("KimiLinear", num_key_value_heads=2, linear_num_heads=2),
    "granite_hybrid": _mixture("GraniteMoeHybrid", num_key_value_heads=1),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


SLOW = ("kimi_linear", "granite_hybrid")  # as long again


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS],
)
def test_kernels_for_a_gpu_say_what_the_cpu_says(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    expected = serve(load(tmp_path))
    loaded = load(tmp_path, device="cuda", cuda_graph_max_tokens=8)
    assert not loaded.engine.has_overlap, "a void row would have moved its state on"
    used = {choice.op: choice.implementation for choice in loaded.runner.kernels.describe()}
    assert used["short_convolution"] == used["gated_delta_rule"] == "triton"
    assert serve(loaded) == expected
    steps = loaded.runner.steps
    assert isinstance(steps, AsynchronousSteps) and steps.forward.num_graphs > 0
    if name == "lfm2":
        return
    drafter = ScriptedDrafter(dict(zip(PROMPTS, expected, strict=True)), oracle)
    speculate(loaded.engine, drafter)
    loaded.engine.flush_cache()
    assert serve(loaded) == expected
    assert loaded.engine.scheduler.stats.num_accepted_tokens > 0


def load(folder: Path, **options: Any) -> LoadedModel:
    config = EngineConfig(
        model=folder, dtype="float32", max_total_tokens=256, max_model_len=64, speculate="off",
        max_running_requests=4, chunked_prefill_size=48, state_interval=48, **options,
    )  # fmt: skip
    return LoadedModel(config)


PROMPTS = ((*TEXT[:34],), (*TEXT[:6], 5))


def serve(loaded: LoadedModel) -> list[list[int]]:
    engine = loaded.engine
    sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    requests = [
        Request(engine.next_request_id(), array("i", prompt), sampling, FakeListener())
        for prompt in PROMPTS
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert all(request.error is None for request in requests)
    return [list(request.output_ids) for request in requests]
