"""Exactness (see test_exactness.py, part a) of a model that two to four processes hold together:
its tokens are those of one process, under the same circumstances.

In float64 through the reference kernels, which sum in the order of the ranks.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import make_adapter
from exactness_jobs import (
    ADAPTED,
    ADAPTERS,
    JOBS,
    Job,
    Load,
    loading,
    outputs_of,
    said_alone,
    score,
    serve,
    truth,
)
from fakes import FakeListener
from preemptions import admit_all
from scripted_drafters import ScriptedDrafter, sometimes_right, speculate

from stemma.runtime.schedule.request import Scoring

DIVISIONS: dict[str, dict[str, Any]] = {
    "ranks": {"tp_size": 2},
    "stages": {"pp_size": 2},
    "ranks of stages": {"tp_size": 2, "pp_size": 2},
    "ranks that divide tokens": {"tp_size": 2, "cp_size": 2},
    "stages that divide tokens": {"pp_size": 2, "cp_size": 2},
}


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    yield from loading(checkpoint)


@pytest.fixture(scope="module", params=JOBS)
def job_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def jobs(job_kind: str) -> list[Job]:
    return JOBS[job_kind]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, job_kind: str) -> list[list[int]]:
    return truth(checkpoint, job_kind)


@pytest.mark.parametrize("division", DIVISIONS)
def test_tokens_are_identical_alone_together_and_on_a_cache_hit(
    load: Load, jobs: list[Job], alone: list[list[int]], division: str
) -> None:
    loaded = load(**DIVISIONS[division])
    outputs = [outputs_of(serve(loaded, [job]))[0] for job in jobs]
    assert outputs == alone
    assert outputs_of(serve(loaded, jobs)) == alone
    assert outputs_of(serve(loaded, jobs)) == alone


@pytest.mark.parametrize("division", ["tp_size", "pp_size"])
def test_tokens_are_identical_in_a_tiny_pool_with_chunks_swaps_and_drafts(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    division: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four heads on three ranks: each has all of attention, and a part of the rest."""
    jobs, alone = jobs[3:], alone[3:]
    size = {division: 3 if division == "tp_size" else 2}
    loaded = load(
        **size, page_size=16, max_total_tokens=144, chunked_prefill_size=23, host_kv_tokens=1024
    )
    scheduler = loaded.engine.scheduler
    stats, host = scheduler.stats, scheduler.kv_cache.host
    assert host is not None
    admit_all(monkeypatch, scheduler)
    monkeypatch.setattr(scheduler.kv_cache.costs, "can_pay", lambda num_tokens: True)
    before = stats.num_preemptions, host.num_loaded_tokens
    outputs = {job.prompt: said for job, said in zip(jobs, alone, strict=True)}
    guess = sometimes_right(random.Random(4))
    for speculates in (False, True):
        if speculates:
            speculate(loaded.engine, ScriptedDrafter(outputs, guess))
        try:
            assert outputs_of(serve(loaded, jobs)) == alone
        finally:
            scheduler.speculation = None
    assert stats.num_preemptions > before[0] and host.num_loaded_tokens > before[1]


def test_tokens_are_identical_on_accelerators_that_plan_ahead(
    load: Load, jobs: list[Job], alone: list[list[int]]
) -> None:
    """Queued steps, in the interpreter's place of GPUs; each rank draws over gathered logits."""
    loaded = load(tp_size=2, device="cuda", chunked_prefill_size=23)
    stats = loaded.engine.scheduler.stats
    num_before = stats.num_overlapped_steps
    assert outputs_of(serve(loaded, jobs)) == alone
    assert outputs_of(serve(loaded, jobs)) == alone
    assert jobs is JOBS["constrained"] or stats.num_overlapped_steps > num_before


def test_scores_and_log_probabilities_equal_those_of_one_process(load: Load) -> None:
    prompt = JOBS["greedy"][5].prompt
    scoring = Scoring(3, prompt[4:], num_top=4)
    whole, divided = (score(load(tp_size=size), prompt, scoring) for size in (1, 2))
    assert divided.scores == pytest.approx(whole.scores, abs=1e-9)
    job = JOBS["sampled"][4]
    wanted = replace(job, sampling=replace(job.sampling, logprobs=5))
    said = []
    for size in (1, 2):
        (request,) = serve(load(tp_size=size), [wanted])
        assert isinstance(request.listener, FakeListener)
        said.append(request.listener.results)
    for one, two in zip(*said, strict=True):
        assert two.token_id == one.token_id
        assert two.logprob == pytest.approx(one.logprob, abs=1e-9)
        assert [top.token_id for top in two.top_logprobs] == [
            top.token_id for top in one.top_logprobs
        ]


@pytest.fixture(scope="module")
def load_adapted(
    load: Load, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("adapters")
    targets = (["q_proj", "v_proj", "down_proj"], ["o_proj", "up_proj"], ["k_proj", "gate_proj"])
    paths = tuple(
        (name, make_adapter(folder / str(name), checkpoint, targets[i], rank=3 + i, seed=i))
        for i, name in enumerate(ADAPTERS[1:])
    )
    return functools.partial(load, lora_paths=paths)


def test_tokens_are_identical_beside_adapters_of_every_linear_layer(load_adapted: Load) -> None:
    """Fewer slots than adapters: they move in and out on all ranks."""
    alone = said_alone(load_adapted, ADAPTED)
    loaded = load_adapted(tp_size=2, max_loras_per_batch=2, chunked_prefill_size=23)
    for _ in range(2):
        assert outputs_of(serve(loaded, ADAPTED)) == alone
