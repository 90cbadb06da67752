"""Chunks of long prompts beside requests that decode."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from engine_harness import EngineHarness, assert_right
from fakes import VOCAB_SIZE

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.runtime.schedule.plan import Encoding, Row, StepPlan, StepResult
from stemma.runtime.schedule.queue.prompt_limits import (
    MIN_TEXT_TOKENS,
    TEXT_STEP_S,
    PromptLimits,
)
from stemma.runtime.schedule.queue.step_costs import StepCosts
from stemma.runtime.schedule.request import Request

FIXED_S, PROMPT_TOKEN_S = 0.010, 0.001


def plan_of(num_decoding: int, num_prompt_tokens: int) -> StepPlan:
    rows = [Row(i, i, 50, (1,)) for i in range(num_decoding)]
    if num_prompt_tokens:
        rows.append(Row(99, 99, 0, (1,) * num_prompt_tokens))
    return StepPlan(1, tuple(rows))


def duration_of(plan: StepPlan, token_s: float = PROMPT_TOKEN_S) -> float:
    num_prompt_tokens = sum(len(row.input_ids) for row in plan.rows if len(row.input_ids) > 1)
    return FIXED_S + num_prompt_tokens * token_s


@pytest.fixture
def harness() -> EngineHarness:
    """Steps take as long as `duration_of` says."""
    return timed_harness(num_pages=2048, token_budget=256)


def timed_harness(token_s: float = PROMPT_TOKEN_S, **options: Any) -> EngineHarness:
    harness = EngineHarness(**options)
    scripted = harness.executor.execute

    def timed(plan: StepPlan) -> StepResult:
        return replace(scripted(plan), duration_s=duration_of(plan, token_s))

    harness.executor.execute = timed  # type: ignore[method-assign]
    return harness


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def chunks_of(harness: EngineHarness, request: Request) -> list[int]:
    """Sizes of a request's chunks, in steps that had decode rows."""
    return [
        len(row.input_ids)
        for plan in harness.executor.plans
        for row in plan.rows
        if row.request_id == request.id
        and any(len(other.input_ids) == 1 for other in plan.rows if other is not row)
    ]


def test_nothing_is_limited_before_both_costs_are_known() -> None:
    costs = StepCosts()
    limits = PromptLimits(costs, page_size=1)
    assert limits.within(1.5, 4) is None
    costs.note(plan_of(4, 0), 0.010, 0.0)
    assert limits.within(1.5, 4) is None
    costs.note(plan_of(0, 100), 0.100, 0.0)
    assert limits.within(1.5, 4) is not None and limits.within(0.0, 4) is None


def test_a_chunk_is_what_fits_the_slowdown() -> None:
    costs = StepCosts()
    limits = PromptLimits(costs, page_size=1)
    costs.note(plan_of(0, 100), 0.100, 0.0)
    costs.note(plan_of(4, 0), 0.040, 0.0)
    assert limits.within(1.5, 4) == 20  # half of 40 ms at 1 ms a token
    assert limits.within(2.0, 4) == 40
    for _ in range(100):
        costs.note(plan_of(4, 20), 0.080, 0.0)  # tokens turn out to cost 2 ms here
    assert limits.within(1.5, 4) == 10


def test_a_long_prompt_beside_decoding_requests_is_cut_small(harness: EngineHarness) -> None:
    decoders = [harness.submit(random_prompt(20, i), max_tokens=120) for i in range(3)]
    for _ in range(5):
        harness.step()
    long = harness.submit(random_prompt(600, 9), max_tokens=2)
    harness.run()
    slowdown = harness.engine.scheduler.limits.slowdown
    chunks = chunks_of(harness, long)
    assert len(chunks) > 20
    assert max(duration_of(p) for p in harness.executor.plans[2:]) <= slowdown * FIXED_S * 1.1 or (
        max(chunks) <= 8
    )
    for request in [*decoders, long]:
        assert_right(request)


def test_a_long_prompt_is_cut_small_also_in_plans_between_those_that_decode() -> None:
    harness = timed_harness(num_stages=2, num_pages=2048, token_budget=256)
    harness.submit(random_prompt(20, 0), max_tokens=200)
    for _ in range(12):
        harness.step()
    long = harness.submit(random_prompt(600, 9), max_tokens=2)
    num_before = len(harness.executor.plans)
    while long.num_computed_tokens < 200:
        harness.step()
    plans = harness.executor.plans[num_before:]
    assert max(len(row.input_ids) for plan in plans for row in plan.rows) <= 8


def test_two_long_prompts_share_what_one_would_get(harness: EngineHarness) -> None:
    for seed in range(3):
        harness.submit(random_prompt(20, seed), max_tokens=200)
    for _ in range(5):
        harness.step()
    longs = [harness.submit(random_prompt(300, 10 + i), max_tokens=2) for i in range(2)]
    harness.run()
    limited = [plan for plan in harness.executor.plans[5:] if any(
        len(row.input_ids) == 1 and row.request_id not in {r.id for r in longs}
        for row in plan.rows
    )]  # fmt: skip
    taken = [
        sum(len(row.input_ids) for row in plan.rows if row.request_id in {r.id for r in longs})
        for plan in limited
    ]
    assert max(taken) <= 10
    for request in harness.requests:
        assert_right(request)


def test_short_prompts_and_long_ones_alone_are_not_limited(harness: EngineHarness) -> None:
    decoder = harness.submit(random_prompt(20, 0), max_tokens=60)
    for _ in range(5):
        harness.step()
    short = harness.submit(random_prompt(100, 1), max_tokens=2)
    harness.step()
    assert chunks_of(harness, short) == [100]
    harness.run()
    long = harness.submit(random_prompt(600, 2), max_tokens=2)
    harness.run()
    sizes = [
        len(row.input_ids)
        for plan in harness.executor.plans
        for row in plan.rows
        if row.request_id == long.id
    ]
    assert sizes[:2] == [256, 256]
    assert_right(decoder)


@pytest.mark.parametrize("token_s", [PROMPT_TOKEN_S / 4, PROMPT_TOKEN_S * 4])
def test_an_encoders_step_is_full_with_the_text_that_fills_its_time(token_s: float) -> None:
    harness = timed_harness(token_s, num_pages=4096, token_budget=4096, max_running=128)
    lengths = [20, 45, 300] * 40
    texts = [harness.submit([1] * length, encoding=Encoding()) for length in lengths]
    harness.run()
    assert all(text.is_finished for text in texts)
    most = max(MIN_TEXT_TOKENS, round(TEXT_STEP_S / token_s))
    steps = [[len(row.input_ids) for row in plan.rows] for plan in harness.executor.plans]
    assert sum(steps[0][:-1]) < MIN_TEXT_TOKENS <= sum(steps[0]), "nothing is known of costs yet"
    for step in steps[1:-1]:
        assert sum(step[:-1]) < most and 0.9 * most < sum(step)


def test_what_decode_rows_take_is_measured_where_prompts_never_end() -> None:
    harness = timed_harness(num_pages=4096, token_budget=256, max_running=8)
    for seed in range(40):  # always one that is being computed
        harness.submit(random_prompt(200, seed), max_tokens=200)
    costs = harness.engine.scheduler.costs
    alone: list[int] = []
    while harness.engine.scheduler.num_waiting:
        harness.step()
        lengths = [len(row.input_ids) for row in harness.executor.plans[-1].rows]
        if max(lengths) == 1:
            alone.append(len(lengths))
    assert alone[0] <= 2, "the first rows that decode are measured at once"
    assert any(num_rows >= 4 for num_rows in alone), "and so are twice as many, and more"
    assert costs.decode_rows_s(8) == pytest.approx(FIXED_S)


def test_a_trial_that_measures_nothing_is_seldom_repeated() -> None:
    costs = StepCosts()
    assert not costs.take_trial(1), "no prompt's cost is known, so nothing would be limited"
    costs.note(plan_of(0, 100), 0.100, 0.0)
    assert costs.take_trial(1)
    costs.note(plan_of(1, 0), 0.010, 0.0)
    assert not costs.take_trial(2)
    num_trials = 0
    for _ in range(320):  # forced runs come with it, say
        num_trials += costs.take_trial(3)
        costs.note(plan_of(3, 20), 0.030, 0.0)
    assert 2 <= num_trials <= 10


def test_what_was_measured_long_ago_is_measured_again() -> None:
    costs = StepCosts()
    costs.note(plan_of(0, 100), 0.100, 0.0)
    costs.note(plan_of(8, 0), 0.020, 0.0)
    for _ in range(10):  # contexts grow
        while not costs.take_trial(8):
            costs.note(plan_of(8, 20), 0.060, 0.0)
        costs.note(plan_of(8, 0), 0.040, 0.0)
    assert costs.decode_rows_s(8) == pytest.approx(0.040, rel=0.1)
    assert costs.prompt_token_s == pytest.approx(0.001, rel=0.2)


@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_hiccup_is_not_believed(num_before: int) -> None:
    costs = StepCosts()
    costs.note(plan_of(0, 100), 0.100, 0.0)
    for _ in range(num_before):
        costs.note(plan_of(4, 0), 0.020, 0.0)
    costs.note(plan_of(4, 0), 1.0, 0.0)
    for _ in range(3):
        costs.note(plan_of(4, 20), 0.040, 0.0)
        costs.note(plan_of(4, 0), 0.020, 0.0)
    assert costs.decode_rows_s(4) == pytest.approx(0.020)
    assert PromptLimits(costs, page_size=1).within(1.5, 4) == pytest.approx(10, abs=1)


def test_steps_shorter_than_their_decode_rows_make_no_prompt_free() -> None:
    costs = StepCosts()
    limits = PromptLimits(costs, page_size=1)
    costs.note(plan_of(0, 100), 0.100, 0.0)
    costs.note(plan_of(64, 0), 0.500, 0.0)
    for _ in range(10_000):
        costs.note(plan_of(64, 16), 0.200, 0.0)
    assert limits.within(1.6, 64) == 300
    limits.begin_step(2048, (), by_level=True)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_request_that_waits_for_a_grammar_stops_nobody(num_stages: int) -> None:
    """A pipeline counts it among the rows beside a plan's own: no trial is for it alone."""
    harness = timed_harness(num_stages=num_stages, num_pages=2048, token_budget=256)
    harness.submit(random_prompt(30, 0), max_tokens=8, grammar=PendingGrammar())
    for _ in range(10):
        if harness.engine.has_work:
            harness.step()
    plain = harness.submit(random_prompt(20, 1), max_tokens=4)
    for _ in range(50):
        if harness.engine.has_work:
            harness.step()
    assert_right(plain)


def test_a_limit_is_for_as_many_rows_as_decode_now() -> None:
    costs = StepCosts()
    limits = PromptLimits(costs, page_size=1)
    costs.note(plan_of(0, 100), 0.100, 0.0)
    for _ in range(20):
        costs.note(plan_of(2, 0), 0.020, 0.0)
        costs.note(plan_of(4, 0), 0.030, 0.0)
    assert limits.within(2.0, 2) == 20
    assert limits.within(2.0, 8) == pytest.approx(50, abs=1)
