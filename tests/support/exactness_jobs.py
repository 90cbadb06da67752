"""The jobs of the exactness tests: prompts that share prefixes, under all that changes logits, and
what carries them out on an engine, with its invariants checked after each step.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from fakes import FakeListener
from waiting import PATIENCE_S, ready

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.vocabulary import single_bytes
from stemma.frontend.protocol.kv_policy import KVPolicy
from stemma.runtime.checkpoint.lora.adapter import Adapter
from stemma.runtime.config import EngineConfig
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.compression import (
    CompressedPrefix,
    CompressedPrefixes,
    Recompression,
)
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
    policy: KVPolicy | None = None  # of the prompt but for its last token


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


def with_two_kinds_each(names: str, cases: Sequence[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Each case with two of the kinds of jobs, each kind with a case or more. `job_kind` is a
    fixture."""
    kinds = tuple(JOBS)
    shared = [
        (kinds[(2 * index + turn) % len(kinds)], *case)
        for index, case in enumerate(cases)
        for turn in range(2)
    ]
    return pytest.mark.parametrize(["job_kind", *names.split()], shared, indirect=["job_kind"])


@functools.cache
def compiled(spec: GrammarSpec) -> PendingGrammar:
    return PendingGrammar(bound=compile_grammar(spec).bind(BYTES))


def loading(checkpoint: Path) -> Iterator[Load]:
    """Yields what loads the checkpoint once for each configuration: float64, reference and no
    drafts unless told."""
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
    for each in loaded.values():
        assert each.engine.grammars is not None
        each.engine.grammars.close()  # three descriptors each, in a worker that loads hundreds
        if each.ranks is not None:
            each.ranks.close()


def said_alone(load: Load, jobs: Sequence[Job]) -> list[list[int]]:
    """The truth: each job alone, on an empty cache, in one chunk."""
    outputs = []
    for job in jobs:
        (request,) = serve(load(), [job])
        assert request.num_cached_tokens == 0
        outputs.append(list(request.output_ids))
    assert len({tuple(output) for output in outputs}) == len(outputs), "the jobs are too alike"
    return outputs


@functools.cache
def truth(checkpoint: Path, kind: str) -> list[list[int]]:
    """What the jobs of a kind say alone: computed once in a process, whichever files ask."""
    (outputs,) = [said_alone(load, JOBS[kind]) for load in loading(checkpoint)]
    return outputs


@dataclass(frozen=True)
class Hint:
    """What somebody says of the first tokens of a job before a step."""

    step: int
    action: str
    job: int
    num_tokens: int


def serve(loaded: LoadedModel, jobs: Sequence[Job], hints: Sequence[Hint] = ()) -> list[Request]:
    """Run jobs to their ends, with the invariants checked after each step."""
    engine = loaded.engine
    adapters = [None if job.adapter is None else _adapter_of(loaded, job.adapter) for job in jobs]
    prompts = [_prompt_of(loaded, job) for job in jobs]
    requests = [
        Request(
            engine.next_request_id(),
            prompt,
            job.sampling,
            FakeListener(),
            compressed=kept,
            recompression=_recompression(loaded, job),
            text_ids=None if kept is None else array("i", job.prompt),
            namespace="" if adapter is None else adapter.namespace(""),
            adapter=adapter,
            stop_ids=frozenset(job.sampling.stop_token_ids),
            grammar=None if job.grammar is None else compiled(job.grammar),
            jump_forward=job.jump_forward,
        )
        for job, adapter, (prompt, kept) in zip(jobs, adapters, prompts)
    ]
    arrivals = sorted(range(len(jobs)), key=lambda i: jobs[i].arrives)
    step = 0
    while arrivals or engine.has_work or (engine.kv_store and engine.scheduler.num_waiting):
        if not engine.has_work and not arrivals:
            done = ready(
                [each for each in (engine.kv_store, engine.state_store) if each], PATIENCE_S
            )
            assert done, "no fetch was done"
            for store in done:
                store.collect()
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


_PREFIXES: WeakKeyDictionary[LoadedModel, CompressedPrefixes] = WeakKeyDictionary()


def _prefixes_of(loaded: LoadedModel) -> CompressedPrefixes:
    """As its programs have them."""
    if loaded not in _PREFIXES:
        _PREFIXES[loaded] = loaded.context().compressed
    return _PREFIXES[loaded]


def _prompt_of(loaded: LoadedModel, job: Job) -> tuple[array[int], CompressedPrefix | None]:
    """As the request has it."""
    prompt, policy = array("i", job.prompt), _policy_of(loaded, job)
    if policy is None:
        return prompt, None
    kept, num_replaced = _prefixes_of(loaded).of(prompt[:-1], policy)
    return prompt if kept is None else kept.ids + prompt[num_replaced:], kept


def _policy_of(loaded: LoadedModel, job: Job) -> KVPolicy | None:
    """The job's, or the engine's own."""
    return job.policy or _prefixes_of(loaded).window


def _recompression(loaded: LoadedModel, job: Job) -> Recompression | None:
    policy = _policy_of(loaded, job)
    is_stream = policy is not None and policy.is_stream
    return Recompression(_prefixes_of(loaded), policy) if is_stream else None


def _adapter_of(loaded: LoadedModel, name: str) -> Adapter:
    assert loaded.adapters is not None
    return loaded.adapters.find(name)


def outputs_of(requests: Sequence[Request]) -> list[list[int]]:
    return [list(request.output_ids) for request in requests]


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
