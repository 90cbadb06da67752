"""An engine on the scripted device, and a check that a request's output is right."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from fakes import (
    VOCAB_SIZE,
    FakeListener,
    ScriptedExecutor,
    ScriptedGrammar,
    chain_of,
    expected_output,
    make_request,
    score_of,
    state_of,
)

from stemma.runtime.engine import Engine
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.in_flight import MAX_WAITING_SHARE
from stemma.runtime.schedule.queue.admission import MIN_RATIO
from stemma.runtime.schedule.queue.policy import DEFAULT_POLICY
from stemma.runtime.schedule.request import FinishReason, Request

_RANDOM = random.Random(7)
FAMILIES = [[_RANDOM.randrange(1, VOCAB_SIZE) for _ in range(80)] for _ in range(3)]


@dataclass
class EngineHarness:
    """An engine on a scripted device; every step is followed by a full check."""

    num_pages: int = 64
    page_size: int = 1
    token_budget: int = 32
    max_running: int = 8
    max_model_len: int = 4096
    policy: str = DEFAULT_POLICY
    kv_cache: KVCacheOptions | None = None
    is_hopeful: bool = False  # admits as if hardly anything were generated: many preemptions
    has_overlap: bool = False
    num_stages: int = 1
    waiting_share: float = MAX_WAITING_SHARE  # with overlap, see schedule/in_flight.py
    clock: Callable[[], float] = time.perf_counter
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor = ScriptedExecutor(
            self.page_size,
            can_overlap=self.has_overlap or self.num_stages > 1,
            num_stages=self.num_stages,
            has_states=self.kv_cache is not None and self.kv_cache.states is not None,
        )
        self.engine = Engine(
            self.executor,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_model_len=self.max_model_len,
            token_budget=self.token_budget,
            max_running_requests=self.max_running,
            schedule_policy=self.policy,
            vocab_size=VOCAB_SIZE,
            kv_cache=self.kv_cache,
            clock=self.clock,
            num_stages=self.num_stages,
        )
        self.engine.scheduler._in_flight.max_waiting_share = self.waiting_share
        if self.is_hopeful:
            hope(self.engine)

    def submit(self, prompt: list[int], max_tokens: int = 4, **fields: object) -> Request:
        request = make_request(
            self.engine.next_request_id(), prompt, max_tokens=max_tokens, **fields
        )
        self.engine.submit(request)
        self.executor.requests[request.id] = request
        self.requests.append(request)
        return request

    def step(self) -> None:
        num_before = len(self.executor.plans)
        self.engine.step()
        for defect in self.executor.defects:
            raise defect
        self.engine.scheduler.check()
        for plan in self.executor.plans[num_before:]:
            assert plan.rows or plan.transfers or plan.state_loads
            assert len(plan.rows) <= plan.num_tokens <= self.token_budget
            assert len(plan.rows) <= self.max_running

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            num_before, had_pending = len(self.executor.plans), bool(self.executor.pending)
            self.step()
            num_new = len(self.executor.plans) - num_before
            assert num_new or had_pending, "work is left but nothing was planned"
        raise AssertionError(f"still busy after {max_steps} steps: {self.engine.describe()}")

    def assert_nothing_held(self) -> None:
        """All pages are free or cached and unlocked; flushing frees every one."""
        cache = self.engine.scheduler.kv_cache
        self.engine.scheduler.check()
        assert cache.num_free_pages == self.num_pages
        self.engine.flush_cache()
        self.engine.scheduler.check()
        assert cache.allocator.num_free == self.num_pages
        assert not cache.tree.roots
        if cache.states is not None:
            slots = cache.states.checkpoints
            assert slots.num_free == len(slots.slots), "a state's slot was lost"


def hope(engine: Engine) -> None:
    """Admit, for a while, as if hardly anything were generated, which causes preemptions."""
    engine.scheduler.output_share.overall.value = 0.0
    engine.scheduler.new_tokens._decaying = MIN_RATIO


def listener_of(request: Request) -> FakeListener:
    assert isinstance(request.listener, FakeListener)
    return request.listener


def assert_right(request: Request) -> None:
    """Ended once, with the output of a run that has the machine for itself."""
    listener = listener_of(request)
    assert listener.num_finishes == 1
    output = list(request.output_ids)
    assert listener.tokens == output
    if request.scoring is not None:
        return assert_scored_right(request)
    if request.hidden is not None:
        return assert_pooled_right(request)
    grammar = None if request.grammar is None else request.grammar.bound
    assert grammar is None or isinstance(grammar, ScriptedGrammar)
    expected, reason = expected_output(
        request.prompt, request.max_output_tokens, request.stop_ids, grammar
    )
    if listener.stop_after is not None and len(expected) >= listener.stop_after:
        expected, reason = expected[: listener.stop_after], FinishReason.STOP
    if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert output == expected[: len(output)]
    else:
        assert (output, request.finish_reason) == (expected, reason)


def assert_scored_right(request: Request) -> None:
    scoring = request.scoring
    assert scoring is not None
    if request.finish_reason is FinishReason.STOP:
        expected = [
            score_of(chain_of(request.prompt[: scoring.start + i + 1]), target)
            for i, target in enumerate(scoring.targets)
        ]
        assert request.scores == expected


def assert_pooled_right(request: Request) -> None:
    hidden = request.hidden
    assert hidden is not None
    if request.finish_reason is FinishReason.STOP:
        ends = range(1, len(request.prompt) + 1)
        states = [state_of(chain_of(request.prompt[:end])) for end in ends]
        expected = sum(states, np.zeros(1)) / len(states) if hidden.is_mean else states[-1]
        assert hidden.pooled().tolist() == expected.tolist()
