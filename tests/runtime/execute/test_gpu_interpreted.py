"""An engine on `--device cuda` in Triton's interpreter: the GPU's own kernels in mixed steps.

One set of requests, so few tokens that the interpreter takes seconds: prompts in chunks beside
decodes, a shared prefix, drawing, penalties, a mask, log-probabilities, scores and an embedding.
Everything else about steps on a GPU is tested without the interpreter's cost in test_gpu_steps.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fakes import FakeListener
from step_plans import Feed, PlanDriver
from triton.runtime.interpreter import GridExecutor
from waiting import PATIENCE_S

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.request import HiddenSum, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

TEXT = list(range(40, 70))
BYTES = single_bytes(260)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two layers of two heads: the interpreter's time goes with the number of programs."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    yield make_checkpoint(folder, num_heads=2, num_kv_heads=1, head_dim=64, init_std=0.3, seed=4)
    torch.set_num_threads(num_threads)


def serve(folder: Path, **options: Any) -> list[Request]:
    config = EngineConfig(
        model=folder, dtype="float32", max_total_tokens=128, max_model_len=64,
        max_running_requests=8, chunked_prefill_size=24, **options,
    )  # fmt: skip
    engine = LoadedModel(config).engine
    engine.scheduler.segment_cost_tokens = 0  # whatever is shared is a segment
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8, top_k=9, top_p=0.9, seed=7, logprobs=2)
    adjusted = replace(drawn, repetition_penalty=1.4, presence_penalty=0.7, logit_bias=((65, 3.0),))
    grammar = PendingGrammar(bound=compile_grammar(GrammarSpec("regex", "[a-f]{9}")).bind(BYTES))
    asked: list[tuple[list[int], dict[str, Any]]] = [
        (TEXT[:20], {"sampling": greedy}),
        ([*TEXT[:17], 5], {"sampling": adjusted}),
        ([*TEXT[:17], 9], {"sampling": drawn, "grammar": grammar}),
        (TEXT[:12], {"sampling": greedy, "scoring": Scoring(8, (*TEXT[9:12], 65), num_top=2)}),
        (TEXT[5:9], {"sampling": greedy, "hidden": HiddenSum(is_mean=True)}),
    ]
    requests = [
        Request(engine.next_request_id(), array("i", prompt), listener=FakeListener(), **own)
        for prompt, own in asked
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.scheduler.stats.num_shared_tokens > 0, "no segments were tested"
    return requests


@pytest.fixture(scope="module")
def truth(tiny: Path) -> list[Request]:
    return serve(tiny)


@pytest.mark.parametrize(
    ("page_size", "graph_max_tokens"),
    [(1, 512), pytest.param(16, 0, marks=pytest.mark.slow)],  # 6 s each where nothing else runs
)
def test_kernels_for_a_gpu_say_what_the_cpu_says(
    tiny: Path, truth: list[Request], page_size: int, graph_max_tokens: int
) -> None:
    found = serve(tiny, device="cuda", page_size=page_size, cuda_graph_max_tokens=graph_max_tokens)
    for request, expected in zip(found, truth, strict=True):
        assert request.error is None and request.output_ids == expected.output_ids
        assert request.scores == pytest.approx(expected.scores, abs=1e-4)
        assert _logprobs(request) == pytest.approx(_logprobs(expected), abs=1e-4)
    embedded, wanted = found[-1].hidden, truth[-1].hidden
    assert embedded is not None and wanted is not None
    assert embedded.pooled() == pytest.approx(wanted.pooled(), abs=1e-4)


def _logprobs(request: Request) -> list[float]:
    assert isinstance(request.listener, FakeListener)
    results = request.listener.results
    return [top.logprob for result in results for top in result.top_logprobs]


def test_a_layer_of_a_decode_step_takes_seven_launches(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight where a step has wide items; eleven with norms and activations apart."""
    config = read_model_config(tiny)
    runner = ModelRunner(tiny, config, dtype="float32", num_pages=64, device="cuda")
    launched: list[str] = []
    launch = GridExecutor.__call__
    product = torch.nn.functional.linear

    def counted(executor: GridExecutor, *args: Any, **options: Any) -> None:
        launched.append(executor.fn.__name__)
        launch(executor, *args, **options)

    def multiplied(*args: Any) -> torch.Tensor:
        launched.append("cuBLAS")
        return product(*args)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    monkeypatch.setattr(torch.nn.functional, "linear", multiplied)
    driver = PlanDriver(runner)
    sequence = driver.sequence()
    driver.step([Feed(sequence, TEXT[:3])])
    launched.clear()
    driver.step([Feed(sequence, [TEXT[3]])])
    found = Counter(launched)
    of_a_layer = {
        "_product": 2, "_rotate_and_store": 1, "_attend_items": 1, "_merge_partials": 1, "cuBLAS": 2
    }  # fmt: skip
    num_layers = config.num_layers
    assert {name: found[name] - (name == "cuBLAS") for name in of_a_layer} == {
        name: number * num_layers for name, number in of_a_layer.items()
    }  # and the logits' product
    assert found["_rms_norm"] == 1  # behind the last layer
    assert not found["_act_and_mul"]


@pytest.mark.slow
def test_the_command_line_runs_on_the_device_that_it_names(tiny: Path) -> None:
    runner = ModelRunner(tiny, read_model_config(tiny), dtype="float32", num_pages=16)
    (expected,) = PlanDriver(runner).generate([list(b"ab")], 2)
    command = [
        sys.executable, "-m", "stemma", "generate", "ab", "--raw", "--max-tokens", "2",
        "--temperature", "0", "--model", str(tiny), "--max-total-tokens", "64", "--json",
        "--max-model-len", "32", "--device", "cuda",
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert bytes(expected).decode("utf-8", "replace") in json.loads(done.stdout).values()
