"""Exactness (docs/how-it-works/architecture.md): no feature changes what a request says.

Part a. In float64 through the reference kernels the tokens, greedy or sampled with a seed, are
identical to those of the request alone on an empty cache, whatever there is of

    cache hits, also of generated turns    chunked prefill (1, 7, 64, all)    page sizes 1 and 16
    batch composition                      order and time of arrival          aborted neighbours
    preemption in a tiny pool              tree attention on and off          all of it at random
    every scheduling policy
    jump-forward on and off                host tier, swap, leases and hints on and off
    overlap on and off                     synchronous or asynchronous steps
    adapters of its neighbours, and which of them have slots

and whatever the request asks for: greedy, drawn with a seed, with penalties, bias, min_tokens, or
under a grammar.

Part c. Low precision and fast kernels: the tokens that path A chose (batch, cache hits, chunks) are
replayed through path B (one scoring pass on an empty cache); at every position the best logprob
exceeds that of A's token by at most tau, the reference kernels' own error against a wider type,
measured by the test on the same tokens and printed.

Part b, that tier moves leave KV bit-equal, is in test_transfer.py; whole programs are in
test_program_exactness.py. One file, since all of it compares with the same jobs alone.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies
import pytest
import torch
from adapters import make_adapter
from engine_harness import hope
from fakes import FakeListener
from scripted_drafters import (
    ScriptedDrafter,
    always_wrong,
    oracle,
    sometimes_right,
    speculate,
    verify_all,
)

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.runtime.checkpoint.lora.adapter import Adapter
from stemma.runtime.config import EngineConfig
from stemma.runtime.engine import LoadedModel
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.schedule.queue.policy import DEFAULT_POLICY, POLICY_NAMES
from stemma.runtime.schedule.request import FinishReason, Request, Scoring
from stemma.runtime.schedule.sampling_params import SamplingParams

Load = Callable[..., LoadedModel]


@dataclass(frozen=True)
class Job:
    """A request to be: `arrives` and `leaves` are step numbers; `leaves` is an abort."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrives: int = 0
    leaves: int | None = None
    grammar: GrammarSpec | None = None
    jump_forward: bool = True
    adapter: str | None = None  # of those that `load_adapted` serves


def _jobs() -> list[Job]:
    """Prompts that share prefixes at and around page edges, and some that share nothing."""
    rng = random.Random(5)
    text = [rng.randrange(256) for _ in range(100)]
    shared = [text[:n] for n in (1, 15, 16, 17, 33, 64)]
    prompts = [[*prefix, *(rng.randrange(256) for _ in range(own))] for own, prefix in
               zip((0, 1, 3, 0, 17, 6), shared)]  # fmt: skip
    prompts += [text[:64], [rng.randrange(256) for _ in range(90)]]
    greedy = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    return [Job(tuple(prompt), greedy) for prompt in prompts]


GREEDY = _jobs()
SAMPLED = [
    replace(job, sampling=SamplingParams(max_tokens=10, temperature=0.9, top_p=p, top_k=k, seed=i))
    for i, (job, p, k) in enumerate(zip(GREEDY, (1.0, 0.7) * 4, (None, None, 20, 5) * 2))
]


def _adjusted(index: int, job: Job) -> Job:
    """Half greedy, half drawn; bytes that repeat are dear, even ones are masked to the end."""
    sampling = SamplingParams(
        max_tokens=10,
        temperature=0.9 * (index % 2),
        min_p=0.02,
        seed=index,
        frequency_penalty=(0.0, 1.5)[index // 2 % 2],
        presence_penalty=(1.0, -0.5, 0.0)[index % 3],
        repetition_penalty=(1.4, 1.0, 0.8, 3.0)[index % 4],
        logit_bias=((65 + 2 * index, 3.5), (1, -100)),
        stop_token_ids=tuple(range(0, 260, 2)) if index % 3 == 1 else (),
        min_tokens=10,
        ignore_eos=True,
    )
    return replace(job, sampling=sampling)


ADJUSTED = [_adjusted(index, job) for index, job in enumerate(GREEDY)]
SPECS = (
    GrammarSpec("regex", r'\{"id":[0-9]{1,4},"colour":"(red|green|blue)","by":"[a-z]*"\}'),
    GrammarSpec("choices", '["north east","north west","southern","no wind at all today"]'),
    GrammarSpec(
        "ebnf", 'start: "<ul>" item+ "</ul>"\nitem: "<li>" (/[a-z0-9]{1,3}/ | start) "</li>"'
    ),
    GrammarSpec("regex", r"(\w{2}: [^\n]{1,12}\n){3,}"),
)


def _constrained(index: int, job: Job) -> Job:
    """Under automata and a parser; greedy, drawn and penalised; every second one token by token."""
    sampling = (GREEDY, SAMPLED, ADJUSTED)[index % 3][index].sampling
    sampling = replace(sampling, max_tokens=18, stop_token_ids=(), min_tokens=0)
    return replace(job, sampling=sampling, grammar=SPECS[index % 4], jump_forward=index % 2 == 0)


CONSTRAINED = [_constrained(index, job) for index, job in enumerate(GREEDY)]
ADAPTERS = (None, "first", "second", "third")
ADAPTED = [
    replace(job, adapter=name)
    for job, other in zip(GREEDY[2:6], SAMPLED[2:6])
    for name, job in zip(ADAPTERS, (job, other, job, job))
]
JOBS = {
    "greedy": GREEDY, "sampled": SAMPLED, "adjusted": ADJUSTED, "constrained": CONSTRAINED
}  # fmt: skip
BYTES = single_bytes(260)


@functools.cache
def compiled(spec: GrammarSpec) -> PendingGrammar:
    return PendingGrammar(bound=compile_grammar(spec).bind(BYTES))


@pytest.fixture(scope="module")
def load(checkpoint: Path) -> Iterator[Load]:
    """Loads the checkpoint once for each configuration; float64, reference and no drafts unless
    told."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are tiny: threads would only wait for each other
    loaded: dict[tuple[tuple[str, object], ...], LoadedModel] = {}

    def load_once(**options: Any) -> LoadedModel:
        options = {
            "dtype": "float64", "kernels": "reference", "max_total_tokens": 2048,
            "speculate": "off", **options
        }  # fmt: skip
        key = tuple(sorted(options.items()))
        if key not in loaded:
            has_overlap = options.pop("has_overlap", None)
            with pytest.MonkeyPatch.context() as patch:
                if has_overlap is not None:  # on a CPU, which computes when a step is submitted
                    patch.setattr(ModelRunner, "can_overlap", has_overlap)
                loaded[key] = LoadedModel(EngineConfig(model=checkpoint, **options))
            assert has_overlap in (None, loaded[key].engine.has_overlap)
        loaded[key].engine.flush_cache()
        assert not loaded[key].engine.has_work
        return loaded[key]

    yield load_once
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=JOBS)
def jobs(request: pytest.FixtureRequest) -> list[Job]:
    return JOBS[request.param]


@pytest.fixture(scope="module")
def alone(load: Load, jobs: list[Job]) -> list[list[int]]:
    """The truth: each job alone, on an empty cache, in one chunk."""
    outputs = []
    for job in jobs:
        loaded = load()
        (request,) = serve(loaded, [job])
        assert request.num_cached_tokens == 0
        outputs.append(list(request.output_ids))
    assert len({tuple(output) for output in outputs}) == len(outputs), "the jobs are too alike"
    return outputs


def serve(loaded: LoadedModel, jobs: Sequence[Job], hints: Sequence[Hint] = ()) -> list[Request]:
    """Run jobs to their ends, with the invariants checked after each step."""
    engine = loaded.engine
    adapters = [None if job.adapter is None else _adapter_of(loaded, job.adapter) for job in jobs]
    requests = [
        Request(
            engine.next_request_id(),
            array("i", job.prompt),
            job.sampling,
            FakeListener(),
            namespace="" if adapter is None else adapter.namespace(""),
            adapter=adapter,
            stop_ids=frozenset(job.sampling.stop_token_ids),
            grammar=None if job.grammar is None else compiled(job.grammar),
            jump_forward=job.jump_forward,
        )
        for job, adapter in zip(jobs, adapters)
    ]
    arrivals = sorted(range(len(jobs)), key=lambda i: jobs[i].arrives)
    step = 0
    while arrivals or engine.has_work:
        while arrivals and jobs[arrivals[0]].arrives <= step:
            engine.submit(requests[arrivals.pop(0)])
        for job, request in zip(jobs, requests):
            if job.leaves == step:
                engine.abort(request)
        for hint in hints:
            if hint.step == step:
                prefix = jobs[hint.job].prompt[: hint.num_tokens]
                getattr(engine.hints, hint.action)("", prefix)
        engine.step()
        engine.scheduler.check()
        step += 1
    for job, request in zip(jobs, requests):
        if job.leaves is None or request.finish_reason is not FinishReason.ABORT:
            ended = (FinishReason.LENGTH, *[FinishReason.STOP] * (job.grammar is not None))
            assert request.finish_reason in ended, request.error
    return requests


def _adapter_of(loaded: LoadedModel, name: str) -> Adapter:
    assert loaded.adapters is not None
    return loaded.adapters.find(name)


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]


# --- part a: the same tokens ---------------------------------------------------------------------


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
            if expected_hits and len(job.prompt) > page_size:
                assert request.num_cached_tokens >= (len(job.prompt) - 1) // page_size * page_size
        assert outputs == [expected, expected]


def test_tokens_are_identical_when_a_generated_turn_is_in_the_cache(load: Load) -> None:
    loaded = load()
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


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [16, 2048])
@pytest.mark.parametrize("cost", [0, 8, 1_000_000])
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


@pytest.mark.parametrize("kind", ["oracle", "wrong", "random"])
@pytest.mark.parametrize(
    ("page_size", "chunk", "options"),
    [
        (1, 2048, {}),
        (1, 7, {"kernels": "cpu"}),
        (16, 23, {}),
        (1, 32, {"max_total_tokens": 160}),
        (1, 24, {"device": "cuda", "disable_overlap": True}),
    ],
)
def test_tokens_are_identical_whatever_is_drafted(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    kind: str,
    page_size: int,
    chunk: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also beside requests that are aborted amid their drafts, and with too few pages for all."""
    rng = random.Random(page_size + chunk)
    guess = {"oracle": oracle, "wrong": always_wrong, "random": sometimes_right(rng)}[kind]
    loaded = load(page_size=page_size, chunked_prefill_size=chunk, **options)
    scheduler, stats = loaded.engine.scheduler, loaded.engine.scheduler.stats
    if "max_total_tokens" in options:
        monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    outputs = {job.prompt: output for job, output in zip(jobs, alone)}
    num_before, num_steps = stats.num_accepted_tokens, stats.num_steps
    drafted = stats.num_draft_tokens
    speculate(loaded.engine, ScriptedDrafter(outputs, guess))
    try:
        leaving = [replace(job, arrives=i, leaves=i + 4) for i, job in enumerate(jobs)]
        assert outputs_of(serve(loaded, [*jobs, *leaving]))[: len(jobs)] == alone
    finally:
        scheduler.speculation = None
    num_accepted = stats.num_accepted_tokens - num_before
    assert stats.num_draft_tokens > drafted and stats.num_steps > num_steps
    assert (num_accepted > 0) == (kind != "wrong")


@pytest.mark.parametrize("drafters", ["auto", "suffix", "siblings,grammar", "ngram"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 2048), (16, 23)])
def test_tokens_are_identical_with_the_drafters_there_are(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    drafters: str,
    page_size: int,
    chunk: int,
) -> None:
    """Also when all has been said before; whatever a guess costs, it is verified."""
    loaded = load(page_size=page_size, chunked_prefill_size=chunk, speculate=drafters)
    stats, speculation = loaded.engine.scheduler.stats, loaded.engine.scheduler.speculation
    assert speculation is not None
    verify_all(speculation)
    num_before = stats.num_accepted_tokens
    for _ in range(3):
        requests = serve(loaded, jobs)
        assert outputs_of(requests) == alone
        loaded.engine.flush_cache()
    if drafters in ("auto", "suffix") and jobs is not CONSTRAINED:
        assert stats.num_accepted_tokens > num_before, "what was said before was not guessed"


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
    ],
)
def test_tokens_are_identical_on_an_accelerator(
    load: Load,
    jobs: list[Job],
    alone: list[list[int]],
    page_size: int,
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
    monkeypatch.setattr(loaded.engine.scheduler.admission, "_require_room", lambda *_: None)
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
        monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
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
    monkeypatch.setattr(scheduler.admission, "_require_room", lambda *_: None)
    monkeypatch.setattr(scheduler.kv_cache.costs, "can_pay", lambda num_tokens: True)
    # Measured costs would decide how prompts are cut and whom the gate holds back: none is known.
    monkeypatch.setattr(scheduler.costs, "note", lambda plan, duration_s, now_s: None)
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


@dataclass(frozen=True)
class Hint:
    """What somebody says of the first tokens of a job before a step."""

    step: int
    action: str
    job: int
    num_tokens: int


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
    try:
        requests = serve(loaded, [*staying, *leaving], circumstances["hints"])
        assert outputs_of(requests)[: len(jobs)] == alone
    finally:
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


# --- part c: low precision and fast kernels -------------------------------------------------------


def score(loaded: LoadedModel, token_ids: Sequence[int], scoring: Scoring) -> Request:
    """Logprobs of the scoring's targets; computed in as few chunks as the budget allows."""
    request = Request(
        loaded.engine.next_request_id(),
        array("i", token_ids),
        SamplingParams(),
        FakeListener(),
        scoring=scoring,
    )
    loaded.engine.submit(request)
    while loaded.engine.has_work:
        loaded.engine.step()
    assert request.finish_reason is FinishReason.STOP, request.error
    return request


@dataclass(frozen=True)
class Replay:
    """Logprobs at each generated position: of path A's token, and the best one's."""

    chosen: list[float]
    best: list[float]


def replay(loaded: LoadedModel, request: Request, best_ids: list[int] | None = None) -> Replay:
    """Path B: one pass over A's tokens on an empty cache, against A's and the best tokens.

    `best_ids`: score these instead of this path's own best tokens.
    """
    token_ids = request.token_ids[:-1]
    start = request.num_prompt_tokens - 1
    loaded.engine.flush_cache()
    chosen = score(loaded, token_ids, Scoring(start, tuple(request.output_ids)))
    targets = tuple(best_ids or chosen.score_argmax)
    loaded.engine.flush_cache()
    best = score(loaded, token_ids, Scoring(start, targets))
    assert best.num_cached_tokens == 0
    return Replay(chosen.scores, best.scores)


@pytest.mark.parametrize(
    ("dtype", "wider"), [("bfloat16", "float32"), ("float32", "float64")], ids=str
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_of_the_fast_path_are_best_within_the_reference_error(
    load: Load, dtype: str, wider: str, page_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = load(
        dtype=dtype,
        kernels="auto",
        page_size=page_size,
        chunked_prefill_size=24,
        max_total_tokens=208,
    )
    serve(fast, GREEDY)  # so that path A has cache hits
    path_a = serve(fast, [replace(job, arrives=i) for i, job in enumerate(GREEDY)])
    assert sum(request.num_cached_tokens for request in path_a) > 0
    path_b = load(dtype=dtype, kernels="auto", page_size=page_size)
    reference, wide = load(dtype=dtype), load(dtype=wider)
    excess, error, excess_of_wrong = 0.0, 0.0, 0.0
    for request in path_a:
        mine = replay(path_b, request)
        excess = max(excess, *(b - c for b, c in zip(mine.best, mine.chosen)))
        wrong = [(token_id + 1) % 256 for token_id in request.output_ids]
        wrongs = replay(path_b, request, wrong).best
        excess_of_wrong = max(excess_of_wrong, *(b - w for b, w in zip(mine.best, wrongs)))
        argmax = score(wide, request.token_ids[:-1], _scoring_of(request)).score_argmax
        truth = replay(wide, request, argmax)
        theirs = replay(reference, request, argmax)
        for a, b in ((truth.chosen, theirs.chosen), (truth.best, theirs.best)):
            error = max(error, *(abs(x - y) for x, y in zip(a, b)))
    tau = 2 * error  # the excess is a difference of two logprobs
    with capsys.disabled():
        print(
            f"\n  exactness {dtype}, page size {page_size}: excess {excess:.2e}, tau {tau:.2e} "
            f"(2 x the reference kernels' error against {wider})"
        )
    assert excess <= tau
    assert excess_of_wrong > tau, "tau is so large that wrong tokens would pass"


def _scoring_of(request: Request) -> Scoring:
    return Scoring(request.num_prompt_tokens - 1, tuple(request.output_ids))
