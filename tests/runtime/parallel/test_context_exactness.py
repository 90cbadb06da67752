"""Exactness (see test_exactness.py, part a) where two or three processes divide tokens and KV: what
they say is what one process says, under the same circumstances.

In float64 through the reference kernels; attention's parts are merged in the order of the ranks.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
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
from mixtures import make_mixture
from preemptions import admit_all
from ranks import without_library
from scripted_drafters import ScriptedDrafter, sometimes_right, speculate

from stemma.errors import InvalidRequest
from stemma.kernels.torch_communicator import TorchCommunicator
from stemma.runtime.config import EngineConfig
from stemma.runtime.parallel import meeting
from stemma.runtime.schedule.request import Scoring


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


def test_tokens_are_identical_alone_together_and_on_a_cache_hit(
    load: Load, jobs: list[Job], alone: list[list[int]]
) -> None:
    loaded = load(cp_size=2)
    assert [outputs_of(serve(load(cp_size=2), [job]))[0] for job in jobs] == alone
    assert outputs_of(serve(loaded, jobs)) == alone
    assert outputs_of(serve(loaded, jobs)) == alone


@pytest.mark.parametrize("sizes", [{"cp_size": 3}, {"cp_size": 2, "pp_size": 2}], ids=str)
def test_tokens_are_identical_in_a_tiny_pool_with_chunks_swaps_and_drafts(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    sizes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages come back from the host on other ranks than they left."""
    jobs, alone = jobs[3:], alone[3:]
    loaded = load(
        **sizes, page_size=16, max_total_tokens=144, chunked_prefill_size=23, host_kv_tokens=1024
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


def test_scores_equal_those_of_one_process(load: Load) -> None:
    prompt = JOBS["greedy"][5].prompt
    scoring = Scoring(3, prompt[4:], num_top=4)
    whole, divided = (score(load(cp_size=size), prompt, scoring) for size in (1, 2))
    assert divided.scores == pytest.approx(whole.scores, abs=1e-12)


def test_tokens_are_identical_beside_adapters(load: Load, checkpoint: Path, tmp_path: Path) -> None:
    """The tokens of a rank may have none."""
    paths = tuple(
        (name, make_adapter(tmp_path / str(name), checkpoint, targets, rank=3 + i, seed=i))
        for i, (name, targets) in enumerate(
            zip(ADAPTERS[1:], (["q_proj", "v_proj"], ["o_proj", "up_proj"], ["down_proj"]))
        )
    )
    load_adapted = functools.partial(load, lora_paths=paths)
    alone = said_alone(load_adapted, ADAPTED)
    loaded = load_adapted(cp_size=2, max_loras_per_batch=2, chunked_prefill_size=23)
    assert outputs_of(serve(loaded, ADAPTED)) == alone


@pytest.mark.parametrize("family", ["DeepseekV3", "Mixtral"])
def test_tokens_are_identical_of_latents_and_of_experts(family: str, tmp_path: Path) -> None:
    make_mixture(tmp_path, family, has_tokenizer=True)
    for load in loading(tmp_path):
        jobs = JOBS["greedy"][3:]
        alone = said_alone(load, jobs)
        loaded = load(cp_size=2, page_size=16, chunked_prefill_size=23)
        for _ in range(2):
            assert outputs_of(serve(loaded, jobs)) == alone


def test_tokens_sent_to_their_experts_through_gloo_get_the_bits_of_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mixture(tmp_path, "Mixtral", has_tokenizer=True)
    jobs, sizes = JOBS["greedy"][3:], {"cp_size": 2, "ep_size": 2, "tp_size": 2}
    scoring = Scoring(3, jobs[0].prompt[4:], num_top=4)
    for load in loading(tmp_path):
        alone = said_alone(load, jobs)
        expected = score(load(**sizes), jobs[0].prompt, scoring).scores
        monkeypatch.setattr(meeting, "SharedMemory", without_library)
        through_gloo = load(**sizes, chunked_prefill_size=4096)
        found = through_gloo.runner.ranks.communicators
        assert [type(each) for each in found] == [TorchCommunicator] * 2
        assert score(through_gloo, jobs[0].prompt, scoring).scores == expected
        assert outputs_of(serve(through_gloo, jobs)) == alone


def test_each_rank_has_its_part_of_the_kv(load: Load) -> None:
    """Of one pool of as many tokens; one page more is for what others store."""
    whole, divided = (load(cp_size=size, page_size=16) for size in (1, 2))
    assert divided.runner.num_pages == whole.runner.num_pages == 2048 // 16
    page_bytes = whole.runner.kv_layout.bytes_per_token * 16
    assert divided.runner.pool.num_bytes == whole.runner.pool.num_bytes // 2 + page_bytes


@pytest.mark.parametrize(
    "options",
    [{"tp_size": 32}, {"device": "cuda"}, {"deterministic": True}],
    ids=str,
)
def test_what_does_not_go_with_divided_tokens_is_refused_by_name(
    options: dict[str, Any], checkpoint: Path
) -> None:
    with pytest.raises(InvalidRequest, match=r"cp_size"):
        EngineConfig(model=checkpoint, cp_size=2, **options)
