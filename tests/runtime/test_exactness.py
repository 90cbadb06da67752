"""Exactness, part a (docs/how-it-works/architecture.md): no feature changes what a request says.

In float64 through the reference kernels the tokens, greedy or sampled with a seed, are
identical to those of the request alone on an empty cache, whatever there is of

    cache hits, also of generated turns    chunked prefill (1, 7, 64, all)    page sizes 1 and 16
    batch composition                      order and time of arrival          aborted neighbours
    preemption in a tiny pool              tree attention on and off          all of it at random
    every scheduling policy
    jump-forward on and off                host tier, swap, leases and hints on and off
    overlap on and off                     synchronous or asynchronous steps
    adapters of its neighbours, and which of them have slots    drafts, right and wrong ones

and whatever the request asks for: greedy, drawn with a seed, with penalties, bias, min_tokens, or
under a grammar.

Part b, that tier moves leave KV bit-equal, is in test_transfer.py; part c, low precision and fast
kernels, in test_low_precision.py. More of drafts is in test_draft_exactness.py, beam search in
test_beam_exactness.py, whole programs in test_program_exactness.py.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies
import pytest
from adapters import make_adapter
from engine_harness import hope
from exactness_jobs import (
    ADAPTED,
    ADAPTERS,
    ADJUSTED,
    CONSTRAINED,
    GREEDY,
    JOBS,
    Hint,
    Job,
    Load,
    compiled,
    loading,
    outputs_of,
    score,
    serve,
    truth,
)
from fakes import FakeListener
from preemptions import admit_all
from scripted_drafters import (
    ScriptedDrafter,
    sometimes_right,
    speculate,
)

from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.queue.policy import DEFAULT_POLICY, POLICY_NAMES
from stemma.runtime.schedule.request import FinishReason, Request, Scoring


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


def test_adjustments_do_change_what_is_said(load: Load) -> None:
    """Else the tests of exactness below would hold nothing of them."""
    for index, job in enumerate(ADJUSTED):
        plain = replace(
            job.sampling,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias=(),
            stop_token_ids=(),
        )
        changed, same = serve(load(), [job, replace(job, sampling=plain)])
        assert changed.output_ids != same.output_ids, index
        if job.sampling.stop_token_ids:
            assert all(token_id % 2 for token_id in changed.output_ids)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("jump_forward", [False, True])
def test_tokens_are_identical_with_jump_forward_on_and_off(
    load: Load, page_size: int, jump_forward: bool
) -> None:
    alone = [outputs_of(serve(load(), [job]))[0] for job in CONSTRAINED]
    loaded = load(page_size=page_size, chunked_prefill_size=24)
    stats = loaded.engine.scheduler.stats
    num_before, num_steps = stats.num_jumped_tokens, stats.num_steps
    jobs = [replace(job, jump_forward=jump_forward) for job in CONSTRAINED]
    assert outputs_of(serve(loaded, jobs)) == alone
    assert (stats.num_jumped_tokens - num_before > 20) == jump_forward
    assert stats.num_steps > num_steps


def test_an_output_under_a_grammar_is_of_its_language_or_the_beginning_of_it(load: Load) -> None:
    for job, request in zip(CONSTRAINED, serve(load(), CONSTRAINED)):
        assert job.grammar is not None
        pending = compiled(job.grammar)
        assert pending.bound is not None
        matcher = pending.bound.matcher()
        assert all(matcher.consume(token_id) for token_id in request.output_ids)
        if request.finish_reason is FinishReason.STOP:
            assert matcher.is_accepting()


@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_identical_on_a_cache_hit(
    load: Load, jobs: list[Job], alone: list[list[int]], page_size: int
) -> None:
    loaded = load(page_size=page_size)
    for job, expected in zip(jobs, alone):
        outputs = []
        for expected_hits in (False, True):
            (request,) = serve(loaded, [job])
            outputs.append(list(request.output_ids))
            if expected_hits:
                assert request.num_cached_tokens >= len(job.prompt) - 1
        assert outputs == [expected, expected]


@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_are_identical_when_a_generated_turn_is_in_the_cache(
    load: Load, page_size: int
) -> None:
    loaded = load(page_size=page_size)
    (first,) = serve(loaded, [GREEDY[4]])
    turn = replace(GREEDY[4], prompt=(*first.token_ids, 65, 66, 67))
    (hit,) = serve(loaded, [turn])
    assert hit.num_cached_tokens >= first.num_tokens - 1
    loaded.engine.flush_cache()
    (miss,) = serve(loaded, [turn])
    assert miss.num_cached_tokens == 0
    assert hit.output_ids == miss.output_ids


@pytest.mark.parametrize(
    ("page_size", "chunk"), [(1, 1), (1, 7), (1, 64), (1, 2048), (16, 16), (16, 23), (16, 64)]
)
def test_tokens_are_identical_for_any_chunk_size(
    load: Load, jobs: list[Job], alone: list[list[int]], page_size: int, chunk: int
) -> None:
    loaded = load(page_size=page_size, chunked_prefill_size=chunk)
    assert outputs_of(serve(loaded, jobs)) == alone


@pytest.mark.parametrize(
    ("page_size", "chunk", "cost"),
    [
        (1, 16, 0), (16, 2048, 0), (1, 2048, 8), (16, 16, 8),
        (1, 16, 1_000_000), (16, 2048, 1_000_000),
    ],
)  # fmt: skip
def test_tokens_are_identical_with_tree_attention_on_and_off(
    load: Load, jobs: list[Job], alone: list[list[int]], page_size: int, chunk: int, cost: int
) -> None:
    """`cost` decides how much is shared: all that can be, what pays, nothing."""
    loaded = load(kernels="cpu", page_size=page_size, chunked_prefill_size=chunk)
    scheduler = loaded.engine.scheduler
    scheduler.segment_cost_tokens, before = cost, scheduler.segment_cost_tokens
    num_before = scheduler.stats.num_shared_tokens
    try:
        assert outputs_of(serve(loaded, jobs)) == alone
        assert outputs_of(serve(loaded, jobs)) == alone
    finally:
        scheduler.segment_cost_tokens = before
    assert (scheduler.stats.num_shared_tokens > num_before) == (cost < 1_000_000)


@pytest.mark.parametrize(("page_size", "chunk", "share"), [(1, 7, 1.0), (16, 40, 0.0)])
def test_tokens_are_identical_with_overlap_on_and_off(
    load: Load, jobs: list[Job], alone: list[list[int]], page_size: int, chunk: int, share: float
) -> None:
    """Whether the others wait for rows under a grammar, or go on beside them."""
    loaded = load(page_size=page_size, chunked_prefill_size=chunk, has_overlap=True)
    scheduler = loaded.engine.scheduler
    num_before = scheduler.stats.num_overlapped_steps
    scheduler._in_flight.max_waiting_share = share
    mixed = [*jobs, *(replace(job, arrives=i, leaves=i + 6) for i, job in enumerate(GREEDY))]
    assert outputs_of(serve(loaded, mixed))[: len(jobs)] == alone
    assert scheduler.stats.num_overlapped_steps > num_before or not share


@pytest.mark.parametrize("max_running", [1, 3, 8])
def test_tokens_are_identical_in_any_batch(
    load: Load, jobs: list[Job], alone: list[list[int]], max_running: int
) -> None:
    loaded = load(max_running_requests=max_running)
    assert outputs_of(serve(loaded, jobs)) == alone


@pytest.mark.parametrize(
    ("page_size", "chunk", "options"),
    [
        (1, 2048, {}),
        (16, 23, {}),
        (1, 7, {"disable_overlap": True}),
        (1, 64, {"max_total_tokens": 128, "host_kv_tokens": 512}),
        (None, 64, {"max_total_tokens": 160, "host_kv_tokens": 512}),
    ],
)
def test_tokens_are_identical_on_an_accelerator(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    page_size: int | None,
    chunk: int,
    options: dict[str, Any],
) -> None:
    """Queued steps, planned while the one before runs; in the interpreter's place of a GPU."""
    loaded = load(device="cuda", page_size=page_size, chunked_prefill_size=chunk, **options)
    stats = loaded.engine.scheduler.stats
    num_before = stats.num_overlapped_steps
    assert outputs_of(serve(loaded, jobs)) == alone
    assert outputs_of(serve(loaded, jobs)) == alone
    num_overlapped = stats.num_overlapped_steps - num_before
    if "disable_overlap" in options:
        assert num_overlapped == 0
    elif jobs is not CONSTRAINED:  # whose tokens are waited for; chunks of prompts are not
        assert num_overlapped > 0


@pytest.mark.parametrize(("page_size", "pool"), [(1, 128), (16, 144)])
def test_tokens_are_identical_after_preemption(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    page_size: int,
    pool: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, alone = jobs[3:], alone[3:]
    loaded = load(page_size=page_size, max_total_tokens=pool, chunked_prefill_size=32)
    stats = loaded.engine.scheduler.stats
    num_before = stats.num_preemptions
    admit_all(monkeypatch, loaded.engine.scheduler)
    assert outputs_of(serve(loaded, jobs)) == alone
    assert stats.num_preemptions > num_before, "the pool was not small enough to test anything"


@pytest.fixture(scope="module")
def load_adapted(
    load: Load, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., LoadedModel]:
    """With three adapters, of different ranks and modules."""
    folder = tmp_path_factory.mktemp("adapters")
    targets = (["q_proj", "v_proj", "down_proj"], ["o_proj", "up_proj"], ["k_proj", "gate_proj"])
    paths = tuple(
        (name, make_adapter(folder / str(name), checkpoint, targets[i], rank=3 + i, seed=i))
        for i, name in enumerate(ADAPTERS[1:])
    )
    return functools.partial(load, lora_paths=paths)


@pytest.fixture(scope="module")
def adapted_alone(load: Load, load_adapted: Load) -> list[list[int]]:
    """The truth: each job alone on an engine with all slots; base's on one that knows none."""
    outputs = []
    for job in ADAPTED:
        (request,) = serve(load() if job.adapter is None else load_adapted(), [job])
        assert request.num_cached_tokens == 0
        outputs.append(list(request.output_ids))
        load_adapted()  # its cache is flushed
    assert len({tuple(output) for output in outputs}) == len(outputs), "the jobs are too alike"
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_loras_per_batch": 1, "chunked_prefill_size": 7},
        {"max_loras_per_batch": 2, "page_size": 16, "chunked_prefill_size": 23},
        {"kernels": "cpu", "max_running_requests": 5},
        {"max_total_tokens": 128, "chunked_prefill_size": 32, "host_kv_tokens": 512},
        {"device": "cuda", "max_loras_per_batch": 2},
    ],
)
def test_tokens_are_identical_beside_other_adapters(
    load_adapted: Load,
    adapted_alone: list[list[int]],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same prompts through three adapters and none at once, then on a warm cache."""
    loaded = load_adapted(**options)
    scheduler = loaded.engine.scheduler
    num_before = scheduler.stats.num_preemptions
    is_small = "max_total_tokens" in options
    if is_small:
        admit_all(monkeypatch, scheduler)
    assert outputs_of(serve(loaded, ADAPTED)) == adapted_alone
    again = [replace(job, arrives=index) for index, job in enumerate(ADAPTED[::-1])]
    assert outputs_of(serve(loaded, again)) == adapted_alone[::-1]
    assert (scheduler.stats.num_preemptions > num_before) == is_small


@pytest.mark.parametrize(("page_size", "pool"), [(1, 128), (16, 144)])
def test_tokens_are_identical_after_swaps_to_the_host_and_back(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    page_size: int,
    pool: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = load(
        page_size=page_size, max_total_tokens=pool, chunked_prefill_size=32, host_kv_tokens=1024
    )
    scheduler = loaded.engine.scheduler
    host = scheduler.kv_cache.host
    assert host is not None
    admit_all(monkeypatch, scheduler)
    monkeypatch.setattr(scheduler.kv_cache.costs, "can_pay", lambda num_tokens: True)
    num_before = scheduler.stats.num_preemptions
    for _ in range(2):
        num_loaded = host.num_loaded_tokens
        assert outputs_of(serve(loaded, jobs)) == alone
        assert host.num_loaded_tokens > num_loaded, "nothing came back from the host"
    assert scheduler.stats.num_preemptions > num_before


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_identical_for_any_order_of_arrival(
    load: Load, jobs: list[Job], alone: list[list[int]], seed: int
) -> None:
    rng = random.Random(seed)
    loaded = load(chunked_prefill_size=16)
    late = [replace(job, arrives=rng.randrange(12)) for job in jobs]
    order = rng.sample(range(len(jobs)), len(jobs))
    outputs = outputs_of(serve(loaded, [late[i] for i in order]))
    assert outputs == [alone[i] for i in order]


def test_tokens_are_identical_beside_aborted_neighbours(
    load: Load, jobs: list[Job], alone: list[list[int]]
) -> None:
    """The aborted ones share their prefixes with those that stay."""
    loaded = load(chunked_prefill_size=24)
    leaving = [replace(job, leaves=2 + i) for i, job in enumerate(jobs) if i % 2]
    staying = [replace(job, arrives=1) for job in jobs]
    requests = serve(loaded, [*leaving, *staying])
    aborted = [r for r in requests[: len(leaving)] if r.finish_reason is FinishReason.ABORT]
    assert len(aborted) == len(leaving)
    assert outputs_of(requests[len(leaving) :]) == alone


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_identical_under_everything_at_once(
    load: Load, jobs: list[Job], alone: list[list[int]], seed: int
) -> None:
    rng = random.Random(100 + seed)
    page_size = rng.choice([1, 16])
    loaded = load(
        page_size=page_size,
        chunked_prefill_size=rng.choice([16, 19, 40]),
        max_total_tokens=rng.choice([160, 208]),
        max_running_requests=rng.choice([3, 8]),
    )
    staying = [replace(job, arrives=rng.randrange(20)) for job in jobs * 2]
    leaving = [replace(rng.choice(jobs), arrives=a, leaves=a + 4) for a in range(0, 20, 4)]
    # Some aborts come after the end; what matters here is those that stay.
    requests = serve(loaded, [*staying, *leaving])
    assert outputs_of(requests[: len(staying)]) == alone * 2


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_tokens_are_identical_under_every_policy(
    load: Load, jobs: list[Job], alone: list[list[int]], policy: str
) -> None:
    loaded = load(max_running_requests=3, chunked_prefill_size=24)
    loaded.engine.scheduler.policy = policy
    late = [replace(job, arrives=2 * i) for i, job in enumerate(jobs)]
    try:
        assert outputs_of(serve(loaded, late)) == alone
    finally:
        loaded.engine.scheduler.policy = DEFAULT_POLICY


def _hints() -> hypothesis.strategies.SearchStrategy[Hint]:
    integers = hypothesis.strategies.integers
    actions = hypothesis.strategies.sampled_from(["pin", "retain", "demote", "prefetch", "share"])
    return hypothesis.strategies.builds(Hint, integers(0, 40), actions, integers(0, 7),
                                        integers(1, 90))  # fmt: skip


@hypothesis.strategies.composite
def _circumstances(draw: hypothesis.strategies.DrawFn) -> dict[str, Any]:
    """A configuration, and when each job arrives and, as a copy of itself, is aborted."""
    pick = hypothesis.strategies.sampled_from
    steps = hypothesis.strategies.integers(0, 25)
    page_size = draw(pick([1, 16]))
    return {
        "options": {
            "kernels": draw(pick(["cpu", "reference"])),
            "page_size": page_size,
            "chunked_prefill_size": draw(pick([16, 40, 2048])),
            "max_running_requests": draw(pick([1, 3, 8])),
            "max_total_tokens": draw(pick([144, 2048])),
            "host_kv_tokens": draw(pick([0, 320])),
            "disable_leases": draw(pick([False, True])),
            "has_overlap": draw(pick([False, True])),
        },
        "hints": draw(hypothesis.strategies.lists(_hints(), max_size=6)),
        "drafts": draw(hypothesis.strategies.none() | hypothesis.strategies.integers(0, 99)),
        "policy": draw(pick(POLICY_NAMES)),
        "cost": draw(pick([0, 16, 1_000_000])),
        "arrivals": draw(hypothesis.strategies.lists(steps, min_size=8, max_size=8)),
        "aborts": draw(
            hypothesis.strategies.lists(
                steps | hypothesis.strategies.none(), min_size=8, max_size=8
            )
        ),
    }


def _check_circumstances(
    load: Load, jobs: list[Job], alone: list[list[int]], circumstances: dict[str, Any]
) -> None:
    loaded = load(**circumstances["options"])
    scheduler = loaded.engine.scheduler
    scheduler.segment_cost_tokens, before = circumstances["cost"], scheduler.segment_cost_tokens
    loaded.engine.scheduler.policy = circumstances["policy"]
    staying = [replace(job, arrives=step) for job, step in zip(jobs, circumstances["arrivals"])]
    leaving = [
        replace(job, arrives=max(step - 3, 0), leaves=step)
        for job, step in zip(jobs, circumstances["aborts"])
        if step is not None
    ]
    if circumstances["drafts"] is not None and not loaded.engine.has_overlap:
        outputs = {job.prompt: output for job, output in zip(jobs, alone)}
        guess = sometimes_right(random.Random(circumstances["drafts"]))
        speculate(loaded.engine, ScriptedDrafter(outputs, guess))
    try:
        requests = serve(loaded, [*staying, *leaving], circumstances["hints"])
        assert outputs_of(requests)[: len(jobs)] == alone
    finally:
        scheduler.speculation = None
        scheduler.segment_cost_tokens = before
        loaded.engine.scheduler.policy = DEFAULT_POLICY


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(circumstances=_circumstances())
def test_tokens_are_identical_in_random_circumstances(
    load: Load, jobs: list[Job], alone: list[list[int]], circumstances: dict[str, Any]
) -> None:
    _check_circumstances(load, jobs, alone, circumstances)


@pytest.mark.slow
@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(circumstances=_circumstances())
def test_tokens_are_identical_in_many_random_circumstances(
    load: Load, jobs: list[Job], alone: list[list[int]], circumstances: dict[str, Any]
) -> None:
    _check_circumstances(load, jobs, alone, circumstances)


def test_scores_are_identical_for_cache_hits_chunks_and_preemption(load: Load) -> None:
    prompt = GREEDY[5].prompt
    scoring = Scoring(20, (*prompt[21:], 65), num_top=2)
    plain = score(load(), prompt, scoring)
    assert len(plain.scores) == len(prompt) - 20
    warm = load()
    serve(warm, [GREEDY[5]])
    hit = score(warm, prompt, scoring)
    assert hit.num_cached_tokens == 20
    chunked = score(load(chunked_prefill_size=7), prompt, scoring)
    tiny = load(max_total_tokens=164, chunked_prefill_size=4)
    long = replace(GREEDY[7].sampling, max_tokens=30)
    beside = Request(0, array("i", GREEDY[7].prompt), long, FakeListener())
    hope(tiny.engine)
    tiny.engine.submit(beside)
    preempted = score(tiny, prompt, scoring)
    assert tiny.engine.scheduler.stats.num_preemptions > 0 and beside.num_output_tokens == 30
    for other in (hit, chunked, preempted):
        assert other.score_argmax == plain.score_argmax
        assert other.scores == pytest.approx(plain.scores, abs=1e-9)
        tops = [[top.token_id for top in place] for place in other.score_tops]
        assert tops == [[top.token_id for top in place] for place in plain.score_tops]
        assert [place[0] for place in tops] == plain.score_argmax
