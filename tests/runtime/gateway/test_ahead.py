"""Likely prompts while the device idles: what they may cost, and what they leave."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import FAMILIES, EngineHarness

from stemma.errors import StemmaError
from stemma.runtime.gateway.ahead import BURST_S, FREE_SHARE, SHARE, AheadPrefills
from stemma.runtime.schedule.plan import PendingStep, StepPlan
from stemma.runtime.schedule.request import Request

KNOWN = 20
TEXT = FAMILIES[0]


class Idle:
    """An engine on a scripted device whose steps take so long, and what is done ahead on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float = 0.0, **options: Any):
        self.now_s, self.step_s = 100.0, step_s
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        monkeypatch.setattr("stemma.runtime.schedule.scheduler.time", clock)
        self.harness = EngineHarness(**{"num_pages": 512, "clock": lambda: self.now_s, **options})
        self.engine = self.harness.engine
        submit = self.engine.submit

        def note(request: Request) -> None:
            self.harness.executor.requests[request.id] = request
            submit(request)

        self.engine.submit = note  # type: ignore[method-assign]
        executor = self.harness.executor
        compute = executor.submit

        def take_time(plan: StepPlan) -> PendingStep:
            self.now_s += self.step_s
            return compute(plan)

        executor.submit = take_time  # type: ignore[method-assign]
        self.ahead = AheadPrefills(self.engine, lambda: self.now_s)

    def offer(self, owner: str = "a", end: int = 60, tail: int = 0) -> array[int]:
        """The text up to `end`, of which `tail` tokens at its end are others."""
        ids = array("i", TEXT[:end])
        for place in range(end - tail, end):
            ids[place] = ids[place] % 7 + 1
        self.keep_known()
        self.ahead.offer(owner, "", ids, KNOWN)
        return ids

    def keep_known(self) -> None:
        """The branch's own text is cached."""
        self.harness.submit(TEXT[:KNOWN], max_tokens=1)
        self.harness.run()

    def idle(self, num_turns: int = 100) -> int:
        """So many turns of an engine's loop without messages; the number of pieces computed."""
        num_pieces = 0
        for _ in range(num_turns):
            self.ahead.begin()
            if not self.engine.has_work:
                break
            num_pieces += 1
            while self.engine.has_work:
                self.harness.step()
        return num_pieces

    def cached(self, ids: array[int]) -> int:
        return self.engine.scheduler.kv_cache.tree.match_length("", ids)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Idle:
    return Idle(monkeypatch)


def test_what_is_likely_is_computed_in_pieces_and_found_by_the_call(idle: Idle) -> None:
    ids = idle.offer()
    assert idle.ahead.has_work and idle.idle() > 1 and not idle.ahead.has_work
    assert idle.cached(ids) == len(ids) and idle.ahead.num_tokens == len(ids) - KNOWN
    idle.ahead.withdraw("a", ids)
    request = idle.harness.submit(ids.tolist())
    idle.harness.run()
    assert request.num_cached_tokens == len(ids) - 1
    assert idle.ahead.num_used_tokens == idle.ahead.num_tokens
    idle.harness.assert_nothing_held()


def test_only_what_agrees_counts_as_used(idle: Idle) -> None:
    idle.offer(tail=10)
    idle.idle()
    idle.ahead.withdraw("a", array("i", TEXT[:70]))
    assert (idle.ahead.num_tokens, idle.ahead.num_used_tokens) == (40, 30)
    idle.harness.assert_nothing_held()


def test_nothing_begins_beside_calls_and_who_comes_waits_for_one_piece(idle: Idle) -> None:
    idle.offer(end=80)
    idle.harness.submit(FAMILIES[1][:30], max_tokens=6)
    assert not idle.ahead.has_work
    idle.ahead.begin()
    assert idle.engine.scheduler.num_waiting == 1, "the call alone"
    idle.harness.run()
    idle.ahead.begin()
    call = idle.harness.submit(FAMILIES[2][:8], max_tokens=1)
    idle.ahead.begin()
    idle.harness.step()
    idle.harness.step()
    assert call.is_finished
    idle.harness.run()
    assert idle.idle() > 0, "then it goes on"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_piece_that_runs_ends_with_its_offer(idle: Idle, is_wanted: bool) -> None:
    ids = idle.offer()
    idle.ahead.begin()
    idle.ahead.withdraw("a", ids if is_wanted else None)
    idle.harness.run()
    assert idle.ahead.num_tokens == 0
    idle.harness.assert_nothing_held()


def test_what_is_in_vain_takes_a_tenth_of_the_time_and_what_is_of_use_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    idle = Idle(monkeypatch, step_s=0.05, num_pages=4096)
    began_s = idle.now_s
    for _ in range(400):
        idle.engine.flush_cache()
        idle.offer(tail=40)
        idle.idle()
        idle.ahead.withdraw("a", array("i", TEXT[:60]))
        idle.now_s += 0.1
    assert idle.ahead.used_s == 0.0
    most_s = BURST_S + SHARE * (idle.now_s - began_s)
    assert 0.5 * most_s < idle.ahead.spent_s <= most_s + 2 * 0.05
    spent_s = idle.ahead.spent_s
    for _ in range(200):
        idle.engine.flush_cache()
        ids = idle.offer()
        idle.idle()
        idle.ahead.withdraw("a", ids)
        idle.now_s += 0.1
    assert idle.ahead.spent_s - spent_s > 2 * SHARE * 200 * 0.1


def test_nothing_is_spent_under_load(idle: Idle) -> None:
    idle.engine.scheduler.costs.load = lambda now_s: 0.8  # type: ignore[method-assign]
    idle.offer()
    assert not idle.ahead.has_work and idle.idle() == 0


def test_leased_and_last_pages_are_nobodys_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(monkeypatch, num_pages=64)
    idle.harness.submit(FAMILIES[1][:25], max_tokens=1)
    idle.harness.run()
    kv_cache = idle.engine.scheduler.kv_cache
    lease = kv_cache.retain("", FAMILIES[1][:25], due_s=0.0, ttl_s=60.0)
    assert lease is not None
    idle.keep_known()
    kept = kv_cache.retain("", TEXT[:KNOWN], due_s=0.0, ttl_s=60.0)
    idle.offer(end=KNOWN + 12)  # of 19 pages, of which 8 are to stay free
    assert kept is not None and not idle.ahead.has_work
    idle.offer(end=KNOWN + 11)
    assert idle.ahead.has_work and idle.idle() > 0
    assert kv_cache.num_free_pages >= FREE_SHARE * 64
    assert idle.cached(array("i", FAMILIES[1][:25])) == 25


def test_what_was_wrong_is_evicted_before_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(monkeypatch, num_pages=96)
    idle.harness.submit(FAMILIES[1][:10], max_tokens=1)  # used longest ago
    idle.harness.run()
    wrong = idle.offer(end=50, tail=30)
    idle.idle()
    own = idle.engine.scheduler.kv_cache.retain("", TEXT[:KNOWN], due_s=0.0, ttl_s=60.0)
    idle.ahead.withdraw("a", array("i", TEXT[:50]))
    assert own is not None and idle.cached(wrong) == 50
    idle.harness.submit(FAMILIES[2][:50], max_tokens=1)
    idle.harness.run()
    assert idle.cached(wrong) < 50, "it gave way"
    assert idle.cached(array("i", FAMILIES[1][:10])) == 10
    assert idle.cached(array("i", TEXT[:KNOWN])) == KNOWN


def test_a_branch_whose_own_text_is_gone_has_nothing_ahead(idle: Idle) -> None:
    idle.offer()
    idle.engine.flush_cache()
    assert idle.idle() == 0 and not idle.ahead.has_work, "its offer has ended"
    idle.offer()
    assert idle.ahead.has_work


def test_a_step_that_fails_ends_its_offer_and_nothing_else(idle: Idle) -> None:
    idle.offer()
    idle.ahead.begin()
    idle.harness.executor.fail_steps.add(len(idle.harness.executor.plans) + 1)
    idle.harness.engine.step()
    assert not idle.ahead.has_work and idle.ahead.num_tokens == 0
    idle.harness.assert_nothing_held()


def test_what_no_context_holds_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(monkeypatch, max_model_len=40)
    idle.offer(end=60)
    with pytest.raises(StemmaError):
        idle.harness.submit(TEXT[:60])
    idle.idle()
    assert not idle.ahead.has_work
