"""Random requests with random aborts, long enough for rare orders of events; nothing may leak."""

from __future__ import annotations

import random

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right, hope
from fakes import STOP_ID, FakeListener

from stemma.runtime.schedule.queue.policy import POLICY_NAMES
from stemma.runtime.schedule.request import FinishReason, Scoring


def soak(num_requests: int, page_size: int, seed: int, check_every: int = 8) -> EngineHarness:
    """Requests arrive in bursts and pauses; some are aborted, the policy changes now and then."""
    rng = random.Random(seed)
    harness = EngineHarness(
        num_pages=256 // page_size, page_size=page_size, token_budget=48, max_running=12
    )
    while len(harness.requests) < num_requests or harness.engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 4))):
            if len(harness.requests) < num_requests:
                submit_random(harness, rng)
        if rng.random() < 0.1 and harness.requests:
            harness.engine.abort(rng.choice(harness.requests[-40:]))
        if rng.random() < 0.01:
            harness.engine.scheduler.policy = rng.choice(POLICY_NAMES)
        if rng.random() < 0.02:
            hope(harness.engine)
        if len(harness.executor.plans) % check_every == 0:
            harness.step()
        else:
            harness.engine.step()
    return harness


def submit_random(harness: EngineHarness, rng: random.Random) -> None:
    prompt = FAMILIES[rng.randrange(3)][: rng.randrange(60)] + [rng.randrange(1, 4)] * 2
    if rng.random() < 0.1:
        start = rng.randrange(len(prompt))
        harness.submit(prompt, scoring=Scoring(start, (*prompt[start + 1 :], 2)))
        return
    harness.submit(
        prompt,
        max_tokens=rng.choice((1, 8, 40)),
        priority=rng.randrange(3),
        namespace=rng.choice(("a", "b")),
        client=rng.choice("xyz"),
        stop_ids=rng.choice((frozenset(), frozenset({STOP_ID}))),
        listener=FakeListener(stop_after=rng.choice((None, None, 3))),
    )


def assert_sound(harness: EngineHarness) -> None:
    for request in harness.requests:
        assert_right(request)
        assert request.finish_reason is not FinishReason.ERROR
    aborted = [r for r in harness.requests if r.finish_reason is FinishReason.ABORT]
    assert aborted and any(r.num_output_tokens for r in aborted)
    assert harness.engine.scheduler.stats.num_preemptions
    assert harness.engine.scheduler.stats.num_finished == len(harness.requests)
    harness.assert_nothing_held()


@pytest.mark.parametrize("page_size", [1, 16])
def test_2000_random_requests_with_aborts_leak_no_page(page_size: int) -> None:
    assert_sound(soak(2000, page_size, seed=page_size))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_20000_random_requests_with_aborts_leak_no_page(page_size: int) -> None:
    assert_sound(soak(20_000, page_size, seed=page_size))
