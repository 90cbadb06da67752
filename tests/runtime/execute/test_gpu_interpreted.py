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
from torch.utils._python_dispatch import TorchDispatchMode
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


class Launches(TorchDispatchMode):
    """Counts kernels and torch's operations by name; those by which the interpreter makes a launch
    do not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._is_launching = False
        launch = GridExecutor.__call__

        def counted(executor: GridExecutor, *args: Any, **options: Any) -> None:
            self.found[executor.fn.__name__] += 1
            self._is_launching = True
            launch(executor, *args, **options)
            self._is_launching = False

        monkeypatch.setattr(GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (self._is_launching or func.is_view or "empty" in name):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", [1, 9])
def test_a_layer_takes_seven_launches_and_hidden_states_and_logits_are_not_copied(
    tiny: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a decode step; eight of a prompt, which has wide items; eleven with norms and activations
    apart."""
    config = read_model_config(tiny)
    runner = ModelRunner(tiny, config, dtype="float32", num_pages=64, device="cuda")
    driver = PlanDriver(runner)
    sequences = [driver.sequence(), driver.sequence()]
    greedy = SamplingParams(temperature=0.0)
    driver.step([Feed(sequences[0], TEXT[:length], greedy)])
    with Launches(monkeypatch) as launches:
        driver.step([Feed(sequences[1], TEXT[:length], greedy)])
    of_a_layer = {
        "_product": 2, "_rotate_and_store": 1, "_attend_items": 1 if length == 1 else 2,
        "_merge_partials": 1, "linear": 2,
    }  # fmt: skip
    assert launches.found == {
        **{name: number * config.num_layers for name, number in of_a_layer.items()},
        "_update_pages": 1, "_take_inputs": 1,
        "_gather_rows": 3,  # embeddings, cosines and sines
        "_rms_norm": 1, "index_select": 1, "mm": 1,  # the rows that sample, and their logits
        "_survey": 1, "_narrow": 1, "_settle": 1, "index_copy_": 1,  # a draw
        "copy_": 4,  # in, from there to the graph's inputs, and two answers out
    }  # fmt: skip


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
