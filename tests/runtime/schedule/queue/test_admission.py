"""Admission: the estimate of what running requests need, and rounds without an engine."""

from __future__ import annotations

from typing import Any

from engine_harness import FAMILIES, EngineHarness, assert_right
from fakes import make_request
from hypothesis import given
from hypothesis import strategies as st

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.runtime.schedule.cache.kv_cache import KVCacheManager
from stemma.runtime.schedule.program_record import ProgramRecord
from stemma.runtime.schedule.queue.admission import (
    MAX_HELD_BACK,
    MIN_RATIO,
    Admission,
    CutPrompt,
    NewTokenEstimate,
    shares_with,
)
from stemma.runtime.schedule.queue.policy import OutputShare, PolicyContext, policy_of
from stemma.runtime.schedule.queue.prompt_limits import PromptLimits
from stemma.runtime.schedule.queue.step_costs import LOAD_MEMORY_S, StepCosts
from stemma.runtime.schedule.queue.waiting_queue import WaitingQueue
from stemma.runtime.schedule.queue.working_set import WorkingSet
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.stats import SchedulerStats


class Rounds:
    """Admission before a real pool and queue; who is admitted runs, and computes nothing."""

    def __init__(self, num_pages: int = 64, page_size: int = 1, policy: str = "fcfs") -> None:
        self.kv_cache = KVCacheManager(num_pages, page_size)
        self.costs, self.stats, share = StepCosts(), SchedulerStats(), OutputShare()
        self.limits = PromptLimits(self.costs, page_size)
        self.waiting = WaitingQueue(policy_of(policy), PolicyContext(self.kv_cache.tree, share))
        self.new_tokens = NewTokenEstimate(share)
        self.working_set = WorkingSet(self.kv_cache, self.costs, lambda: 0.0)
        self.admission = Admission(
            self.kv_cache,
            self.waiting,
            self.working_set,
            self.new_tokens,
            self.limits,
            self.stats,
        )
        self.running: list[Request] = []
        self.cut: list[CutPrompt] = []
        self.num_made = 0

    def wait(self, prompt: list[int], max_tokens: int = 1, **fields: Any) -> Request:
        self.num_made += 1
        request = make_request(self.num_made, prompt, **fields)
        request.max_output_tokens = max_tokens
        self.waiting.add(request)
        return request

    def round(self, budget: int = 100, num_rows: int = 8) -> list[tuple[Request, int]]:
        self.limits.begin_step(budget, [], by_level=False)
        self.admission.begin_step()
        admitted = []
        for request, num_tokens in self.admission.round(
            budget, num_rows, self.running, self.cut, may_break_pins=True
        ):
            admitted.append((request, num_tokens))
            self.waiting.remove(request)
            self.running.append(request)
            self.working_set.note_admission(request)
            self.new_tokens.num_running += request.num_new_tokens
        self.kv_cache.check(self.running)
        return admitted


# --- the estimate ---------------------------------------------------------------------------------


def test_the_new_token_ratio_decays_and_rises_within_its_bounds() -> None:
    share = OutputShare()
    estimate = NewTokenEstimate(share)
    assert estimate.ratio == 1.0  # nothing is known of what requests really use
    share.overall.value = 0.0
    before = estimate.ratio
    estimate.note_step()
    assert estimate.ratio < before
    estimate.note_preemption()
    assert estimate.ratio > before
    for _ in range(5000):
        estimate.note_step()
    assert estimate.ratio == MIN_RATIO
    share.overall.value = 0.5
    assert 0.5 < estimate.ratio < 0.7
    for _ in range(50):
        estimate.note_preemption()
    assert estimate.ratio == 1.0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8))
def test_the_peak_is_that_of_running_all_requests_to_their_end(
    sizes: list[tuple[int, int]],
) -> None:
    """sizes: (generated so far, still to come)."""
    requests = []
    for number, (num_output, num_new) in enumerate(sizes):
        request = make_request(number, [1])
        request.max_output_tokens = num_output + num_new
        for _ in range(num_output):
            request.append_token(1)
        requests.append(request)
    held = peak = sum(num_output for num_output, _ in sizes)
    alive = list(sizes)
    for step in range(31):
        for size in [size for size in alive if size[1] == step]:
            alive.remove(size)
            held -= sum(size)
        held += len(alive)
        peak = max(peak, held)
    assert NewTokenEstimate(OutputShare()).peak(requests) == peak - sum(n for n, _ in sizes)


# --- rounds ---------------------------------------------------------------------------------------


def test_a_round_admits_in_order_until_budget_or_rows_are_used() -> None:
    rounds = Rounds()
    first, second, third = (rounds.wait([own] * 10) for own in (1, 2, 3))
    assert rounds.round(budget=14) == [(first, 10), (second, 4)]
    assert rounds.cut == [(second, 4)]
    rounds.cut.clear()
    assert rounds.round(num_rows=0) == [] and not rounds.admission.has_unasked
    assert rounds.round() == [(third, 10)]


def test_who_finds_no_pages_holds_none_and_ends_the_round() -> None:
    rounds = Rounds(num_pages=20)
    first, large, small = (rounds.wait([own] * n) for own, n in ((1, 10), (2, 15), (3, 2)))
    assert rounds.round() == [(first, 10)]
    assert not large.pages and not small.pages and large in rounds.waiting
    assert not rounds.admission.has_parked and not rounds.admission.has_unasked


def test_who_lacks_but_its_grammar_is_admitted_with_no_tokens() -> None:
    rounds = Rounds()
    request = rounds.wait([1], grammar=PendingGrammar())
    assert rounds.round() == [(request, 0)] and not rounds.cut


def test_who_shares_with_a_cut_prompt_waits_for_it_and_lets_others_pass() -> None:
    rounds = Rounds()
    first, same, other = (rounds.wait([*prompt, 7]) for prompt in ([1] * 20, [1] * 20, [2] * 3))
    rounds.limits.within = lambda slowdown: None  # type: ignore[method-assign]
    assert rounds.round(budget=10) == [(first, 10)]
    assert shares_with(same, rounds.cut) and not shares_with(other, rounds.cut)
    assert rounds.round() == [(other, 4)]


def test_a_program_for_which_the_working_set_has_no_room_is_parked_and_others_pass() -> None:
    rounds = Rounds(policy="program")
    rounds.costs._load_s = LOAD_MEMORY_S  # the device is busy
    programs = [ProgramRecord(), ProgramRecord()]
    for own, program in enumerate(programs):
        begun = rounds.wait([own] * 25, program=program)
        assert rounds.round() == [(begun, 25)]
        begun.num_computed_tokens = 25
        rounds.running.clear()
        rounds.kv_cache.release(begun)
        rounds.working_set.note_finish(begun)
        assert rounds.kv_cache.retain("", begun.token_ids, due_s=1.0, ttl_s=9.0) is not None
    new = rounds.wait([2] * 30, program=ProgramRecord())
    back = rounds.wait([1] * 25 + [2], program=programs[1])
    assert rounds.round() == [(back, 1)]
    assert rounds.admission.has_parked and rounds.stats.num_gated == 1
    assert rounds.waiting.is_parked(new) and not new.pages


def test_a_round_passes_over_so_many_and_says_that_it_has_not_asked_all() -> None:
    rounds = Rounds(num_pages=4000)
    rounds.wait([1] * 40)
    assert rounds.round(budget=10)[0][1] == 10
    for _ in range(MAX_HELD_BACK):
        rounds.wait([1] * 40)
    last = rounds.wait([2])
    assert rounds.round() == [] and rounds.admission.has_unasked
    rounds.cut.clear()
    assert rounds.round(budget=2000, num_rows=99)[-1][0] is last
    assert not rounds.admission.has_unasked


# --- in the scheduler -----------------------------------------------------------------------------


def test_admission_waits_for_room_that_the_running_are_expected_to_need() -> None:
    harness = EngineHarness(num_pages=100, max_running=4)
    first = harness.submit(FAMILIES[0][:20], max_tokens=60)
    harness.step()
    second = harness.submit(FAMILIES[1][:20], max_tokens=60)
    harness.step()
    assert not second.is_admitted  # once 59 + 59 are generated there would be 160 tokens
    harness.run()
    assert harness.engine.scheduler.stats.num_preemptions == 0
    for request in (first, second):
        assert_right(request)


def test_a_request_that_alone_may_outgrow_the_pool_is_admitted_once_it_is_alone() -> None:
    harness = EngineHarness(num_pages=64)
    first = harness.submit([1, 2, 3], max_tokens=20)
    large = harness.submit(FAMILIES[0][:50], max_tokens=10_000)
    harness.run()
    assert first.finish_reason is large.finish_reason is FinishReason.LENGTH
    assert large.num_tokens == 64
    harness.assert_nothing_held()
