"""Deadlines: what is refused on arrival, what is ended later, and what is remembered."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import EngineHarness, listener_of
from fakes import make_request

from stemma.errors import DeadlineExceeded
from stemma.runtime.schedule.queue.deadlines import Deadlines
from stemma.runtime.schedule.queue.policy import OutputShare
from stemma.runtime.schedule.queue.step_costs import StepCosts
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.stats import SchedulerStats

TOKEN_S, STEP_S = 0.001, 0.010


class Watch:
    """Deadlines with costs that are known, and a clock."""

    def __init__(self, *, is_measured: bool = True) -> None:
        self.now_s, self.stats, self.num_made = 5.0, SchedulerStats(), 0
        costs = StepCosts()
        if is_measured:
            costs.prompt_token_s = TOKEN_S
            costs.note_rows(1, 0, STEP_S, 0.0)
        self.deadlines = Deadlines(costs, OutputShare(), self.stats, lambda: self.now_s)

    def request(self, num_prompt_tokens: int, num_output: int = 1, **fields: Any) -> Request:
        self.num_made += 1
        request = make_request(
            self.num_made, [1] * num_prompt_tokens, created_s=self.now_s, **fields
        )
        request.max_output_tokens = num_output
        return request

    def add(self, num_prompt_tokens: int, within_s: float | None, num_output: int = 1) -> Request:
        deadline_s = None if within_s is None else self.now_s + within_s
        request = self.request(num_prompt_tokens, num_output, deadline_s=deadline_s)
        self.deadlines.add(request)
        return request

    def end(self, request: Request) -> None:
        request.finish_reason = FinishReason.STOP
        self.deadlines.note_finish(request)


def test_a_request_that_cannot_be_done_by_its_deadline_is_refused_with_both_times() -> None:
    watch = Watch()
    with pytest.raises(DeadlineExceeded, match=r"deadline is in 0\.01 s.* expected in 0\.14 s"):
        watch.add(100, 0.01, num_output=5)
    assert watch.stats.num_missed_deadlines == 1
    watch.add(100, 0.15, num_output=5)
    assert watch.stats.num_missed_deadlines == 1


def test_nothing_but_the_past_is_refused_before_a_step_was_measured() -> None:
    watch = Watch(is_measured=False)
    watch.add(10_000, 1e-9)
    with pytest.raises(DeadlineExceeded, match=r"^the deadline passed 1e-06 s ago$"):
        watch.add(10, -1e-6)


def test_a_deadline_that_has_passed_on_arrival_is_said_to_have_passed() -> None:
    with pytest.raises(DeadlineExceeded, match=r"passed 2e-07 s ago, the .* expected in 0\.1 s"):
        Watch().add(100, -2e-7)


def test_the_queue_ahead_counts_until_it_is_admitted_or_has_ended() -> None:
    watch = Watch()
    ahead = [watch.add(100, None) for _ in range(3)]
    with pytest.raises(DeadlineExceeded, match=r"expected in 0\.31 s"):
        watch.add(10, 0.1)
    for request in ahead[:2]:
        request.is_admitted = True
        watch.deadlines.note_admission(request)
        watch.end(request)
    watch.end(ahead[2])
    assert not watch.deadlines.num_waiting_tokens
    watch.add(10, 0.1)


def test_of_prompts_counts_what_the_cache_has_not_had_so_far() -> None:
    watch = Watch()
    watch.stats.num_prompt_tokens, watch.stats.num_cached_tokens = 1000, 900
    watch.add(100, None)
    watch.add(100, 0.021)
    with pytest.raises(DeadlineExceeded, match=r"expected in 0\.03 s"):
        watch.add(100, 0.021)


def test_requests_expire_in_order_of_their_deadlines_but_for_those_that_have_ended() -> None:
    watch = Watch()
    late, soon, ended, other = (watch.add(1, s) for s in (3.0, 1.0, 2.0, 9.0))
    watch.add(1, None)
    watch.end(ended)
    assert watch.deadlines.next_s == soon.deadline_s
    watch.now_s += 4.0
    assert list(watch.deadlines.expire()) == [soon, late]
    assert late.error == "the deadline was 3 s after its arrival; 4 s have passed"
    assert late.error_kind == "DeadlineExceeded"
    assert watch.stats.num_missed_deadlines == 2
    assert watch.deadlines.next_s == other.deadline_s


def test_one_that_ends_while_others_expire_does_not_expire() -> None:
    watch = Watch()
    first, second = watch.add(1, 1.0), watch.add(1, 2.0)
    watch.now_s += 4.0
    expired = []
    for request in watch.deadlines.expire():
        expired.append(request)
        watch.end(second)
    assert expired == [first] and second.error is None


def test_what_has_ended_is_forgotten_in_proportion() -> None:
    watch = Watch()
    for _ in range(1000):
        watch.end(watch.add(1, 100.0))
    assert len(watch.deadlines._heap) <= 66


# --- in the scheduler -----------------------------------------------------------------------------


def test_a_refused_request_can_be_aborted_and_leaves_nothing() -> None:
    harness = EngineHarness(clock=lambda: 5.0)
    late = make_request(99, [1] * 20, deadline_s=4.0)
    with pytest.raises(DeadlineExceeded):
        harness.engine.submit(late)
    harness.engine.abort(late)
    scheduler = harness.engine.scheduler
    assert late.is_finished and not scheduler._open and not scheduler.deadlines.num_waiting_tokens
    assert not scheduler.shares._num_open and scheduler.deadlines.next_s is None


@pytest.mark.parametrize("is_running", [True, False])
def test_a_request_ends_when_its_deadline_has_passed(is_running: bool) -> None:
    now_s = 0.0
    harness = EngineHarness(max_running=1, clock=lambda: now_s)
    if not is_running:
        harness.submit([1, 2, 3], max_tokens=8)
        harness.step()
    late = harness.submit([2] * 20, max_tokens=8, deadline_s=0.03, created_s=now_s)
    harness.step()
    assert late.is_admitted is is_running
    now_s = 1.0
    harness.step()
    assert late.finish_reason is FinishReason.ERROR and late.error_kind == "DeadlineExceeded"
    assert late.error is not None and "deadline was 0.03 s after" in late.error
    assert listener_of(late).num_finishes == 1
    harness.run()
    harness.assert_nothing_held()
