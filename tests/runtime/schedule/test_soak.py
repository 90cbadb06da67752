"""Random requests with random aborts, long enough for rare orders of events; nothing may leak."""

from __future__ import annotations

import random

import pytest
from fakes import STOP_ID, FakeListener
from house import FAMILIES, House, assert_right, hope

from stemma.runtime.schedule.queue.policy import POLICY_NAMES
from stemma.runtime.schedule.request import FinishReason, Scoring


def soak(num_requests: int, page_size: int, seed: int, check_every: int = 8) -> House:
    """Requests arrive in bursts and pauses; some are aborted, the policy changes now and then."""
    rng = random.Random(seed)
    house = House(num_pages=256 // page_size, page_size=page_size, token_budget=48, max_running=12)
    while len(house.requests) < num_requests or house.engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 4))):
            if len(house.requests) < num_requests:
                submit_random(house, rng)
        if rng.random() < 0.1 and house.requests:
            house.engine.abort(rng.choice(house.requests[-40:]))
        if rng.random() < 0.01:
            house.engine.set_schedule_policy(rng.choice(POLICY_NAMES))
        if rng.random() < 0.02:
            hope(house.engine)
        if len(house.executor.plans) % check_every == 0:
            house.step()
        else:
            house.engine.step()
    return house


def submit_random(house: House, rng: random.Random) -> None:
    prompt = FAMILIES[rng.randrange(3)][: rng.randrange(60)] + [rng.randrange(1, 4)] * 2
    if rng.random() < 0.1:
        start = rng.randrange(len(prompt))
        house.submit(prompt, scoring=Scoring(start, (*prompt[start + 1 :], 2)))
        return
    house.submit(
        prompt,
        max_tokens=rng.choice((1, 8, 40)),
        priority=rng.randrange(3),
        namespace=rng.choice(("a", "b")),
        client=rng.choice("xyz"),
        stop_ids=rng.choice((frozenset(), frozenset({STOP_ID}))),
        listener=FakeListener(stop_after=rng.choice((None, None, 3))),
    )


def assert_sound(house: House) -> None:
    for request in house.requests:
        assert_right(request)
        assert request.finish_reason is not FinishReason.ERROR
    aborted = [r for r in house.requests if r.finish_reason is FinishReason.ABORT]
    assert aborted and any(r.num_output_tokens for r in aborted)
    assert house.engine.scheduler.stats.num_preemptions
    assert house.engine.scheduler.stats.num_finished == len(house.requests)
    house.assert_nothing_held()


@pytest.mark.parametrize("page_size", [1, 16])
def test_2000_random_requests_with_aborts_leak_no_page(page_size: int) -> None:
    assert_sound(soak(2000, page_size, seed=page_size))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_20000_random_requests_with_aborts_leak_no_page(page_size: int) -> None:
    assert_sound(soak(20_000, page_size, seed=page_size))
