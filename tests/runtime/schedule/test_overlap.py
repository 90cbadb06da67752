"""A second plan while the first is computed: what is ahead, what waits, and what failures undo."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right, listener_of
from fakes import (
    VOCAB_SIZE,
    FakeListener,
    ScriptedExecutor,
    ScriptedGrammar,
    expected_output,
    make_request,
)

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.runtime.config import add_engine_flags, engine_config
from stemma.runtime.engine import Engine
from stemma.runtime.loaded_model import LoadedModel
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.cache.prefix_cache import PendingCopies
from stemma.runtime.schedule.in_flight import InFlight, InFlightStep
from stemma.runtime.schedule.plan import PendingStep, Row, StepPlan
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.schedule.sampling_params import SamplingParams


def overlapped(**fields: Any) -> EngineHarness:
    return EngineHarness(**{"num_pages": 256, "has_overlap": True, **fields})


def test_a_decode_step_is_submitted_before_the_result_of_the_one_before() -> None:
    harness = overlapped()
    for own in (1, 2):
        harness.submit([*FAMILIES[0][:6], own], max_tokens=5)
    harness.run()
    assert harness.executor.events == [
        ("submit", 1), ("submit", 2), ("result", 1), ("submit", 3), ("result", 2), ("submit", 4),
        ("result", 3), ("submit", 5), ("result", 4), ("result", 5),
    ]  # fmt: skip
    for plan in harness.executor.plans[1:]:
        assert [row.from_previous for row in plan.rows] == [0, 1]
        assert [row.input_ids for row in plan.rows] == [(0,), (0,)]
    stats = harness.engine.scheduler.stats
    assert (stats.num_overlapped_steps, stats.num_void_rows) == (4, 0)


def test_nothing_is_ahead_where_it_is_switched_off() -> None:
    executor = ScriptedExecutor(1, can_overlap=True)
    engine = Engine(
        executor, num_pages=64, page_size=1, max_model_len=64, token_budget=32,
        max_running_requests=4, has_overlap=False,
    )  # fmt: skip
    request = make_request(1, FAMILIES[0][:6], max_tokens=4)
    executor.requests[1] = request
    engine.submit(request)
    while engine.has_work:
        engine.step()
        assert not executor.pending
    assert_right(request)
    assert all(row.from_previous is None for plan in executor.plans for row in plan.rows)


@pytest.mark.parametrize(("flags", "has_overlap"), [([], True), (["--disable-overlap"], False)])
def test_the_flag_reaches_the_engine(checkpoint: Path, flags: list[str], has_overlap: bool) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    device = ["--device", "cuda", "--kernels", "reference", "--dtype", "float64"]
    sizes = ["--max-total-tokens", "64"]
    args = parser.parse_args(["--model", str(checkpoint), *device, *sizes, *flags])
    assert LoadedModel(engine_config(args)).engine.describe()["has_overlap"] is has_overlap


def test_prompts_alone_are_computed_in_the_same_steps_with_and_without() -> None:
    plans = []
    for has_overlap in (False, True):
        harness = EngineHarness(num_pages=64, page_size=4, token_budget=16, has_overlap=has_overlap)
        for own in range(1, 6):
            harness.submit([*FAMILIES[0][:8], own], max_tokens=1)
        harness.run()
        plans.append([(row.request_id, row.start, row.input_ids) for plan in harness.executor.plans
                      for row in plan.rows])  # fmt: skip
    assert plans[0] == plans[1]


def test_chunks_of_a_prompt_follow_each_other_without_a_pause() -> None:
    harness = overlapped(token_budget=8)
    request = harness.submit(FAMILIES[0][:30], max_tokens=1)
    harness.step()
    for number in (2, 3, 4):
        harness.step()
        assert harness.executor.events[-2:] == [("submit", number), ("result", number - 1)]
    harness.run()
    assert_right(request)
    assert [row.start for plan in harness.executor.plans for row in plan.rows] == [0, 8, 16, 24]


def test_a_row_under_a_grammar_waits_a_step_for_its_token_while_the_others_go_on() -> None:
    harness = overlapped(max_running=32)
    grammar = ScriptedGrammar(({1: 0, 2: 0, 3: 0},))
    masked = harness.submit([3], max_tokens=4, grammar=PendingGrammar(grammar))
    for own in range(16):
        harness.submit([*FAMILIES[0][:own], 5], max_tokens=12)
    harness.run()
    has_mask = [plan.masks is not None for plan in harness.executor.plans]
    assert has_mask == [True, False, True, False, True, False, True, *[False] * 5]
    for request in harness.requests:
        assert_right(request)
    assert masked.finish_reason is FinishReason.LENGTH


def test_steps_with_many_rows_under_a_grammar_come_in_order() -> None:
    """Else these rows would have every second step only."""
    harness = overlapped(max_running=32)
    grammar = ScriptedGrammar(({1: 0, 2: 0, 3: 0},))
    for own in range(2):
        harness.submit([3, own + 1], max_tokens=4, grammar=PendingGrammar(grammar))
    for own in range(16):
        harness.submit([*FAMILIES[0][:own], 5], max_tokens=12)
    harness.run()
    has_mask = [plan.masks is not None for plan in harness.executor.plans]
    assert has_mask == [*[True] * 4, *[False] * 8]
    assert harness.executor.events[:4] == [
        ("submit", 1),
        ("result", 1),
        ("submit", 2),
        ("result", 2),
    ]


def test_an_output_that_ends_unforeseen_wastes_one_row_of_one_step() -> None:
    harness = overlapped()
    stopped = harness.submit([1, 2], max_tokens=9, listener=FakeListener(stop_after=3))
    counted = harness.submit([2, 1], max_tokens=5)
    harness.run()
    assert_right(stopped)
    assert_right(counted)
    assert harness.engine.scheduler.stats.num_void_rows == 1
    rows = [row.request_id for plan in harness.executor.plans for row in plan.rows]
    assert (rows.count(stopped.id), rows.count(counted.id)) == (4, 5)


def test_what_an_ended_request_computed_is_cached_before_its_void_row_is_done() -> None:
    """Its continuation is planned meanwhile, and must not compute it again."""
    harness = overlapped()
    calls: list[Request] = []

    def go_on(request: Request) -> None:
        calls.append(harness.submit([*request.token_ids, 5], max_tokens=1))
        assert harness.executor.pending

    listener = FakeListener(stop_after=3, when_finished=go_on)
    first = harness.submit(FAMILIES[0][:10], max_tokens=9, listener=listener)
    harness.run()
    assert calls[0].num_cached_tokens == first.num_tokens - 1
    assert_right(calls[0])


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_aborted_request_keeps_its_pages_until_the_pending_step_is_done(page_size: int) -> None:
    harness = overlapped(num_pages=64 // page_size, page_size=page_size)
    request = harness.submit(FAMILIES[0][:20], max_tokens=9)
    harness.step()
    harness.step()
    cache = harness.engine.scheduler.kv_cache
    num_before = cache.num_free_pages
    harness.engine.abort(request)
    assert request.finish_reason is FinishReason.ABORT and listener_of(request).num_finishes == 1
    harness.engine.scheduler.check()
    assert cache.num_free_pages == num_before and harness.engine.has_work
    harness.run()
    harness.assert_nothing_held()
    assert harness.engine.scheduler.stats.num_void_rows == 1


def test_a_table_row_goes_to_nobody_else_before_the_pending_step_is_done() -> None:
    harness = overlapped(max_running=1)
    harness.submit([1, 2], max_tokens=9, listener=FakeListener(stop_after=2))
    second = harness.submit([2, 1], max_tokens=2)
    harness.run()
    assert_right(second)
    events = harness.executor.events
    last_of_first = max(
        plan.step_id for plan in harness.executor.plans if plan.rows[0].request_id != second.id
    )
    assert events.index(("result", last_of_first)) < events.index(("submit", last_of_first + 1))


def test_pages_that_run_out_are_waited_for_before_anybody_is_preempted() -> None:
    harness = overlapped(num_pages=40, max_running=2, is_hopeful=True)
    for own in (1, 2):
        harness.submit([own] * 8, max_tokens=25)
    while not harness.engine.scheduler.stats.num_preemptions:
        harness.step()
    events = harness.executor.events
    last = harness.executor.plans[-1].step_id
    assert events.index(("result", last - 1)) < events.index(("submit", last))
    harness.run()
    for request in harness.requests:
        assert_right(request)


def test_a_running_request_adopts_what_another_published_while_its_chunk_is_pending() -> None:
    harness = overlapped(token_budget=8)
    first = harness.submit(FAMILIES[0][:10], max_tokens=30)
    expected, _ = expected_output(first.prompt, 30)
    while first.num_output_tokens < 28:
        harness.step()
    second = harness.submit([*first.prompt, *expected, 1], max_tokens=2)
    harness.run()
    num_computed = sum(
        len(row.input_ids)
        for plan in harness.executor.plans
        for row in plan.rows
        if row.request_id == second.id
    )
    assert num_computed < second.num_prompt_tokens - 10
    assert_right(second)
    third = harness.submit([*second.token_ids, 1], max_tokens=1)
    harness.run()
    assert third.num_cached_tokens == second.num_tokens - 1, "what it generated is cached as well"


def test_settling_takes_the_pending_result_in() -> None:
    harness = overlapped()
    request = harness.submit([1, 2], max_tokens=2)
    harness.step()
    assert request.num_output_tokens == 0 and harness.executor.pending
    harness.engine.settle()
    harness.engine.settle()  # a second time is no error
    assert request.num_output_tokens == 1 and not harness.executor.pending
    harness.run()
    assert_right(request)


def test_min_tokens_and_penalties_count_the_token_that_is_being_sampled() -> None:
    harness = overlapped()
    sampling = SamplingParams(max_tokens=5, temperature=0.0, min_tokens=3, presence_penalty=1.0)
    request = make_request(1, [1, 2], max_tokens=5, stop_ids=frozenset({99}))
    request = Request(
        1, request.prompt, sampling, request.listener, stop_ids=request.stop_ids
    )  # fmt: skip
    harness.executor.requests[1] = request
    harness.engine.submit(request)
    harness.run()
    rows = [row for plan in harness.executor.plans for row in plan.rows]
    adjustments = [row.adjustments[0] for row in rows if row.adjustments]
    assert [a.masked_ids for a in adjustments] == [(99,)] * 3 + [()] * 2
    assert [len(a.output_ids) for a in adjustments] == [0, 0, 1, 2, 3], "known ones only"


def test_the_step_log_tells_each_overlapped_step_once() -> None:
    harness = overlapped()
    harness.engine.step_log.is_on = True
    for own in (1, 2):
        harness.submit([*FAMILIES[0][:6], own], max_tokens=5)
    harness.executor.fail_steps = {5}
    harness.run()
    harness.submit([1, 2], max_tokens=3)
    harness.run()
    steps = harness.engine.step_log.since(0)["items"]
    assert [step["id"] for step in steps] == [1, 2, 3, 4, 6, 7, 8], "the fifth failed"
    ends = [step["start_s"] + step["ms"] / 1000 for step in steps]
    assert all(later["start_s"] >= end - 1e-3 for later, end in zip(steps[1:], ends))
    assert steps[0]["tokens"] | {"cached": 0} == {
        "prefill": 8, "decode": 0, "forced": 0, "score": 0, "cached": 0,
    }  # fmt: skip


def test_what_a_row_reads_is_proven_by_its_row_of_the_step_before_and_no_other() -> None:
    in_flight = InFlight(has_overlap=True)
    request, other = make_request(1, [1] * 9), make_request(2, [1] * 9)
    request.num_published = request.num_scheduled_tokens = request.num_computed_tokens = 4
    before = planned_rows(1, [Row(1, 0, 0, (1,) * 4)], [request])
    assert in_flight.is_proven(request, before)
    assert not in_flight.is_proven(other, before), "it may have adopted what that wrote"
    other.num_scheduled_tokens = other.num_computed_tokens = 9
    assert in_flight.is_proven(other, before), "it decodes since long"
    in_flight.add(planned_rows(2, [Row(1, 0, 6, (1,) * 2)], [request]))
    assert not in_flight.is_proven(request, before), "two tokens were adopted since"


def planned_rows(step_id: int, rows: list[Row], requests: list[Request]) -> InFlightStep:
    plan = StepPlan(step_id, tuple(rows))
    return InFlightStep(plan, tuple(requests), (None,) * len(rows), PendingCopies((), ()))


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_step_ends_its_own_requests_and_those_behind_it_begin_again() -> None:
    harness = overlapped(token_budget=16)
    harness.executor.fail_steps = {1}
    first = harness.submit(FAMILIES[0][:14], max_tokens=6)
    harness.step()
    reader = harness.submit([*FAMILIES[0][:14], 1, 2], max_tokens=3)
    harness.step()
    assert [row.start for row in harness.executor.plans[1].rows] == [14, 14], "they go on from it"
    assert first.finish_reason is FinishReason.ERROR and "told to fail" in (first.error or "")
    assert not harness.executor.pending, "the step behind was waited for"
    harness.assert_nothing_held()
    harness.run()
    assert_right(reader)
    assert reader.finish_reason is FinishReason.LENGTH
    harness.assert_nothing_held()


def test_nothing_is_submitted_behind_a_step_that_could_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device has not seen its page updates: what came behind would write where others read."""
    harness = overlapped(num_pages=16, page_size=16)
    request = harness.submit([1, 2], max_tokens=9)
    harness.step()

    def refuse(plan: StepPlan) -> PendingStep:
        raise RuntimeError("the device has no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(harness.executor, "submit", refuse)
        late = harness.submit(FAMILIES[0][:20], max_tokens=9)
        harness.step()
    assert request.num_output_tokens == 1, "the step before is taken in"
    for ended in (request, late):
        assert ended.finish_reason is FinishReason.ERROR
        assert ended.error == "the step failed: RuntimeError: the device has no memory left"
    assert not harness.engine.has_work
    harness.assert_nothing_held()
    assert [plan.step_id for plan in harness.executor.plans] == [1]


def test_whoever_reads_what_a_failed_row_wrote_begins_again() -> None:
    harness = overlapped(token_budget=40)
    bad = harness.submit(FAMILIES[0][:20], max_tokens=4)
    harness.executor.row_errors = {bad.id}
    harness.step()
    reader = harness.submit([*FAMILIES[0][:20], 1, 2, 3], max_tokens=4)
    harness.step()
    assert [row.start for row in harness.executor.plans[1].rows] == [20, 20]
    assert bad.finish_reason is FinishReason.ERROR and not reader.is_finished
    harness.run()
    assert_right(reader)
    assert reader.finish_reason is FinishReason.LENGTH and reader.num_cached_tokens == 20
    again = harness.submit([*FAMILIES[0][:20], 1, 2, 3, 4], max_tokens=1)
    harness.run()
    assert_right(again)
    harness.assert_nothing_held()


def test_a_row_that_was_void_when_its_step_failed_begins_again_all_the_same() -> None:
    harness = overlapped(token_budget=40)
    bad = harness.submit(FAMILIES[0][:20], max_tokens=4)
    harness.executor.row_errors = {bad.id}
    harness.executor.fail_steps = {2}
    harness.step()
    reader = harness.submit([*FAMILIES[0][:20], 1, 2, 3], max_tokens=4)
    harness.run()
    assert_right(reader)
    assert reader.finish_reason is FinishReason.LENGTH
    harness.assert_nothing_held()


def test_what_a_failed_request_published_one_step_later_is_withdrawn_too() -> None:
    """Its first chunk fills no page; the second one does, with KV of the first."""
    harness = overlapped(num_pages=16, page_size=16, token_budget=10)
    bad = harness.submit(FAMILIES[0][:30], max_tokens=4)
    harness.executor.row_errors = {bad.id}
    harness.step()
    harness.executor.row_errors = set()  # the second chunk samples nothing: no error shows
    harness.step()
    assert bad.finish_reason is FinishReason.ERROR
    harness.run()
    again = harness.submit(FAMILIES[0][:30], max_tokens=4)
    harness.run()
    assert_right(again)
    assert again.num_cached_tokens == 0
    harness.assert_nothing_held()


@pytest.mark.parametrize("is_planned", [False, True])
def test_copies_asked_for_behind_a_failed_step_are_not_made(is_planned: bool) -> None:
    """The host has what the step was to store; what is loaded of that is worth nothing."""
    harness = overlapped(
        num_pages=640, token_budget=1000, kv_cache=KVCacheOptions(num_host_pages=700)
    )
    rng = random.Random(1)
    kept, filling = ([rng.randrange(1, VOCAB_SIZE) for _ in range(n)] for n in (18, 600))
    for prompt in (kept, filling):
        harness.submit(prompt, max_tokens=1)
        harness.run()
    harness.executor.fail_steps = {3}
    harness.submit(rng.choices(range(1, VOCAB_SIZE), k=24), max_tokens=4)
    harness.step()
    assert {copy.kind for copy in harness.executor.plans[-1].transfers} == {"store"}
    _, num_loaded = harness.engine.scheduler.kv_cache.prefetch("", kept, 0.0)
    assert num_loaded >= 17
    if not is_planned:
        harness.engine.settle()
    harness.run()
    again = harness.submit([*kept, 1], max_tokens=3)
    harness.run()
    assert_right(again)
    assert again.num_cached_tokens <= 1, "what the failed step read itself"
