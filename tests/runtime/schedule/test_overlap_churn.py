"""Random work with a second plan while the first is computed, or with several on their way through
the stages of a pipeline: the same outputs, nothing leaked.

The scripted device withholds a step's result until it is asked for, and checks that nobody else
writes what a pending step names.
"""

from __future__ import annotations

import random

from engine_harness import FAMILIES, EngineHarness
from fakes import FakeListener, ScriptedGrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from random_work import (
    STOP_IDS,
    assert_all_right,
    constrained,
    events,
    failing,
    houses,
    play,
    random_grammar,
    submissions,
)

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.request import HiddenSum, Scoring

SMALL_POOL = st.sampled_from([None, KVCacheOptions(num_host_pages=40)])
OVERLAPPED = houses(
    has_overlap=st.just(True),
    num_stages=st.sampled_from([1, 1, 2, 3]),
    waiting_share=st.sampled_from([0.0, 0.5, 1.0]),
    kv_cache=SMALL_POOL,
)


@settings(max_examples=100, deadline=None)
@given(OVERLAPPED, events(constrained()))
def test_outputs_are_those_without_overlap_whatever_the_workload(
    harness: EngineHarness, work: list[tuple[str, object]]
) -> None:
    play(harness, work)
    assert_all_right(harness)


@settings(max_examples=100, deadline=None)
@given(failing(OVERLAPPED), events(submissions()))
def test_failed_steps_and_rows_leak_nothing_and_spoil_nobody_else(
    harness: EngineHarness, work: list[tuple[str, object]]
) -> None:
    """Not even those whose rows were computed behind the failed ones."""
    play(harness, work)
    assert_all_right(harness)


def churn(seed: int, *, fails: bool) -> EngineHarness:
    """Dense work in a small pool: requests of all kinds come, share, stop, are aborted, preempted
    and, with `fails`, lose their rows and steps."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 16])
    harness = EngineHarness(
        num_pages=rng.choice([64, 96, 160]) if page_size == 1 else rng.choice([6, 10, 20]),
        page_size=page_size,
        token_budget=rng.choice([16, 24, 64]),
        max_running=rng.choice([2, 5, 8]),
        is_hopeful=rng.random() < 0.5,
        has_overlap=True,
        num_stages=rng.choice([1, 1, 2, 3]),
        waiting_share=rng.choice([0.0, 0.5, 1.0]),
        kv_cache=rng.choice([None, KVCacheOptions(num_host_pages=40)]),
    )
    if fails:
        harness.executor.fail_steps = set(rng.sample(range(2, 80), 4))
        harness.executor.row_errors = set(rng.sample(range(1, 25), 4))
    late: list[tuple[PendingGrammar, ScriptedGrammar]] = []
    while len(harness.requests) < 24 or late or harness.engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 3))):
            if len(harness.requests) < 24:
                submit_any(harness, rng, late)
        if late and rng.random() < 0.3:
            grammar, bound = late.pop(0)
            grammar.bound = bound
        if rng.random() < 0.08 and harness.requests:
            harness.engine.abort(rng.choice(harness.requests[-10:]))
        if rng.random() < 0.03:
            harness.engine.flush_cache()
        harness.step()
    return harness


def submit_any(
    harness: EngineHarness, rng: random.Random, late: list[tuple[PendingGrammar, ScriptedGrammar]]
) -> None:
    prompt = FAMILIES[rng.randrange(2)][: rng.randrange(45)] + [rng.randrange(1, 4)] * 2
    kind = rng.randrange(8)
    if kind == 0:
        start = rng.randrange(len(prompt))
        harness.submit(prompt, scoring=Scoring(start, (*prompt[start + 1 :], 2)))
        return
    if kind == 1:
        harness.submit(prompt, hidden=HiddenSum(rng.random() < 0.5))
        return
    fields: dict[str, object] = {}
    if kind in (2, 3):
        bound = random_grammar(rng.randrange(10**6))
        fields = {"grammar": PendingGrammar(), "jump_forward": rng.random() < 0.5}
        late.append((fields["grammar"], bound))  # type: ignore[arg-type]
    harness.submit(
        prompt,
        max_tokens=rng.choice((1, 5, 15)),
        stop_ids=rng.choice((frozenset(), STOP_IDS)),
        listener=FakeListener(stop_after=rng.choice((None, None, 3))),
        **fields,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_dense_work_in_a_small_pool_is_right_and_leaks_nothing(seed: int) -> None:
    assert_all_right(churn(seed, fails=False))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_failures_amid_dense_work_reach_nobody_else(seed: int) -> None:
    assert_all_right(churn(seed, fails=True))
