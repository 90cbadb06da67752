"""Scheduler, KV cache and engine against a scripted device that checks every page it reads."""

from __future__ import annotations

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right, listener_of
from fakes import STOP_ID, FakeListener, expected_output
from hypothesis import given, settings
from random_work import STOP_IDS, assert_all_right, events, failing, houses, play, submissions

from stemma.errors import PromptTooLong
from stemma.runtime.schedule.request import FinishReason, Request, Scoring

# --- random workloads -----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(houses(), events(submissions()))
def test_outputs_equal_an_unbounded_run_whatever_the_workload(
    harness: EngineHarness, work: list[tuple[str, object]]
) -> None:
    play(harness, work)
    assert_all_right(harness)


@settings(max_examples=150, deadline=None)
@given(failing(houses()), events(submissions()))
def test_failed_steps_and_rows_leak_nothing_and_spoil_nobody_else(
    harness: EngineHarness, work: list[tuple[str, object]]
) -> None:
    play(harness, work)
    assert_all_right(harness)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_too_small_for_all_preempts_and_changes_no_output(page_size: int) -> None:
    harness = EngineHarness(
        num_pages=96 // page_size, page_size=page_size, token_budget=64, is_hopeful=True
    )
    for index in range(8):
        harness.submit([*FAMILIES[0][:8], index % 7 + 1, index + 1], max_tokens=40)
    harness.run()
    assert harness.engine.scheduler.stats.num_preemptions > 0
    for request in harness.requests:
        assert_right(request)
    harness.assert_nothing_held()


# --- sharing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "shared"), [(1, 24), (16, 32)])
def test_a_prefix_that_arrives_together_is_computed_once(page_size: int, shared: int) -> None:
    harness = EngineHarness(num_pages=256, page_size=page_size, token_budget=256)
    for own in range(1, 6):
        harness.submit([*FAMILIES[1][:shared], own, own], max_tokens=1)
    harness.step()
    (plan,) = harness.executor.plans
    assert plan.num_tokens == shared + 5 * 2
    assert [row.start for row in plan.rows] == [0, shared, shared, shared, shared]
    assert [request.num_cached_tokens for request in harness.requests] == [0, *[shared] * 4]
    harness.run()
    for request in harness.requests:
        assert_right(request)


def test_a_prefix_that_arrives_together_is_computed_once_when_it_takes_many_chunks() -> None:
    harness = EngineHarness(num_pages=256, token_budget=7)
    for own in range(1, 4):
        harness.submit([*FAMILIES[1][:40], own], max_tokens=2)
    harness.run()
    assert harness.executor.num_computed == 40 + 3 * 2
    for request in harness.requests:
        assert_right(request)


def test_a_prefix_is_computed_once_when_chunks_are_cut_at_page_boundaries() -> None:
    """What the cut leaves of the budget must not start the next prompt behind the first one."""
    harness = EngineHarness(num_pages=64, page_size=16, token_budget=23)
    for own in range(1, 4):
        harness.submit([*FAMILIES[1][:64], own], max_tokens=1)
    harness.run()
    assert harness.executor.num_computed == 64 + 3
    for request in harness.requests:
        assert_right(request)


def test_a_running_request_adopts_what_another_published_meanwhile() -> None:
    """The first ends, and its output is the rest of the second one's prompt."""
    harness = EngineHarness(num_pages=256, token_budget=8)
    first = harness.submit(FAMILIES[0][:10], max_tokens=30)
    expected, _ = expected_output(first.prompt, 30)
    while first.num_output_tokens < 27:
        harness.step()
    prompt = [*first.prompt, *expected, 1]
    second = harness.submit(prompt, max_tokens=2)
    harness.run()
    num_computed = sum(
        len(row.input_ids)
        for plan in harness.executor.plans
        for row in plan.rows
        if row.request_id == second.id
    )
    assert num_computed < len(prompt) - 10
    assert_right(second)


def test_generated_tokens_enter_the_tree_when_their_request_ends() -> None:
    harness = EngineHarness(num_pages=256)
    request = harness.submit(FAMILIES[0][:10], max_tokens=8)
    tree = harness.engine.scheduler.kv_cache.tree
    while not request.is_finished:
        assert tree.num_pages in (0, 10)
        harness.step()
    assert tree.num_pages == 10 + 7


def test_what_a_finished_request_generated_is_reused_by_its_continuation() -> None:
    harness = EngineHarness(num_pages=256)
    first = harness.submit(FAMILIES[0][:10], max_tokens=8)
    harness.run()
    turn = [*first.token_ids, 3, 4]
    second = harness.submit(turn, max_tokens=1)
    harness.run()
    assert second.num_cached_tokens == 10 + 7  # the last token's KV was never computed
    assert_right(second)


def test_namespaces_share_nothing() -> None:
    harness = EngineHarness()
    for namespace in ("a", "b"):
        harness.submit(FAMILIES[0][:10], max_tokens=1, namespace=namespace)
    harness.run()
    assert [request.num_cached_tokens for request in harness.requests] == [0, 0]


def test_a_scored_position_is_computed_even_when_its_kv_is_cached() -> None:
    harness = EngineHarness()
    prompt = FAMILIES[0][:12]
    harness.submit(prompt, max_tokens=1)
    harness.run()
    request = harness.submit(prompt, scoring=Scoring(5, (*prompt[6:], 2)))
    harness.run()
    assert request.num_cached_tokens == 5 and request.num_output_tokens == 0
    assert_right(request)


# --- order and limits -----------------------------------------------------------------------------


def test_decoding_never_waits_behind_a_long_prompt() -> None:
    harness = EngineHarness(num_pages=512, token_budget=8)
    short = harness.submit([1, 2], max_tokens=12)
    harness.step()
    harness.submit(FAMILIES[0][:60] + FAMILIES[1][:40], max_tokens=1)
    for _ in range(6):
        num_before = short.num_output_tokens
        harness.step()
        assert short.num_output_tokens == num_before + 1
        assert harness.executor.plans[-1].num_tokens == 8
    harness.run()


def test_requests_are_admitted_first_come_first_served() -> None:
    harness = EngineHarness(max_running=1)
    order: list[int] = []
    for number in range(4):
        listener = FakeListener(when_finished=lambda request: order.append(request.id))
        harness.submit([1, number + 1], max_tokens=2, listener=listener)
    harness.run()
    assert order == [request.id for request in harness.requests]


def test_a_preempted_request_comes_before_those_that_never_ran() -> None:
    harness = EngineHarness(num_pages=40, max_running=2, is_hopeful=True)
    for own, max_tokens in ((1, 30), (2, 25), (3, 1)):
        harness.submit([own] * 8, max_tokens=max_tokens)
    while not harness.engine.scheduler.stats.num_preemptions:
        harness.step()
    num_before = len(harness.executor.plans)
    harness.run()
    ids = [row.request_id for plan in harness.executor.plans[num_before:] for row in plan.rows]
    _, preempted, fresh = (request.id for request in harness.requests)
    assert ids.index(preempted) < ids.index(fresh)
    for request in harness.requests:
        assert_right(request)


def test_scores_of_a_preempted_request_are_neither_lost_nor_taken_twice() -> None:
    harness = EngineHarness(num_pages=64, token_budget=3, is_hopeful=True)
    harness.submit(FAMILIES[0][:14], max_tokens=50)  # in the end it needs the whole pool
    prompt = FAMILIES[1][:40]
    request = harness.submit(prompt, scoring=Scoring(5, (*prompt[6:], 2)))
    harness.run()
    starts = [r.start for p in harness.executor.plans for r in p.rows if r.request_id == request.id]
    assert harness.engine.scheduler.stats.num_preemptions > 0
    assert starts != sorted(starts), "nothing that was scored had to be computed again"
    assert_right(request)


def test_a_prompt_uses_all_that_decoding_leaves_of_the_budget() -> None:
    harness = EngineHarness(num_pages=80, page_size=16, token_budget=16, max_running=16)
    for own in range(1, 8):
        harness.submit([own, own], max_tokens=100)
    harness.step()
    prompt = harness.submit(FAMILIES[0][:48], max_tokens=1)
    num_steps = 0
    while not prompt.is_finished:
        harness.step()
        num_steps += 1
    assert num_steps <= 48 // 9 + 4  # 9 tokens a step, less at page boundaries
    assert_right(prompt)


def test_a_chunk_ends_at_a_page_boundary_when_it_can() -> None:
    harness = EngineHarness(num_pages=16, page_size=16, token_budget=40)
    harness.submit(FAMILIES[0][:75], max_tokens=1)
    harness.run()
    assert [row.start for plan in harness.executor.plans for row in plan.rows] == [0, 32, 64]


def test_a_prompt_larger_than_the_pool_is_refused_with_the_figures() -> None:
    harness = EngineHarness(num_pages=10)
    with pytest.raises(
        PromptTooLong, match=r"too long: 10 tokens > 9 maximum.*length is 10 tokens"
    ):
        harness.submit([1] * 10)
    assert not harness.engine.has_work
    fits = harness.submit([1] * 9, max_tokens=5)
    harness.run()
    assert_right(fits)
    assert fits.num_output_tokens == 1 and fits.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_lone_request_with_max_tokens_beyond_the_pool_ends_with_length(page_size: int) -> None:
    harness = EngineHarness(num_pages=64 // page_size, page_size=page_size)
    request = harness.submit(FAMILIES[0][:20], max_tokens=1000)
    harness.run()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_tokens == 64
    assert_right(request)
    harness.assert_nothing_held()


def test_max_model_len_ends_a_request_before_the_pool_does() -> None:
    harness = EngineHarness(num_pages=200, max_model_len=30)
    request = harness.submit(FAMILIES[0][:20], max_tokens=1000)
    harness.run()
    assert request.num_output_tokens == 10 and request.finish_reason is FinishReason.LENGTH


def test_a_stop_token_is_no_part_of_the_output() -> None:
    harness = EngineHarness(num_pages=600)
    prompt = next(
        [n, m] for n in range(1, 8) for m in range(1, 8)
        if expected_output([n, m], 500, STOP_IDS)[1] is FinishReason.STOP
    )  # fmt: skip
    request = harness.submit(prompt, max_tokens=500, stop_ids=STOP_IDS)
    harness.run()
    assert request.finish_reason is FinishReason.STOP and STOP_ID not in request.output_ids
    assert_right(request)


# --- aborts and failures --------------------------------------------------------------------------


def test_an_abort_frees_the_pages_at_once_and_twice_is_no_error() -> None:
    harness = EngineHarness()
    running = harness.submit(FAMILIES[0][:10], max_tokens=50)
    harness.step()
    waiting = harness.submit(FAMILIES[1][:10], max_tokens=50)
    for request in (running, waiting):
        harness.engine.abort(request)
        harness.engine.abort(request)
        assert request.finish_reason is FinishReason.ABORT
        assert listener_of(request).num_finishes == 1
    assert not harness.engine.has_work
    harness.assert_nothing_held()


def test_a_failed_step_ends_its_own_rows_and_later_requests_are_right() -> None:
    harness = EngineHarness(num_pages=256, token_budget=15)  # the first three, no more
    for own in range(1, 4):
        harness.submit([*FAMILIES[0][:12], own], max_tokens=6)
    waiting = harness.submit(FAMILIES[2][:30], max_tokens=3)
    harness.executor.fail_steps = {1}
    harness.step()
    failed = [request for request in harness.requests if request.is_finished]
    assert failed and waiting not in failed
    for request in failed:
        assert request.finish_reason is FinishReason.ERROR
        assert "StepFailed: step 1 was told to fail" in (request.error or "")
    assert harness.engine.scheduler.kv_cache.tree.num_pages == 0, (
        "a failed step left KV in the tree"
    )
    again = harness.submit([*FAMILIES[0][:12], 1], max_tokens=6)
    harness.run()
    assert again.num_cached_tokens == 0
    assert_right(again)
    assert_right(waiting)
    harness.assert_nothing_held()


def test_a_failed_step_keeps_what_earlier_steps_computed() -> None:
    harness = EngineHarness(num_pages=256, token_budget=8)
    harness.submit(FAMILIES[0][:24], max_tokens=6)
    harness.executor.fail_steps = {3}
    harness.run()
    again = harness.submit(FAMILIES[0][:24], max_tokens=6)
    harness.run()
    assert again.num_cached_tokens == 16
    assert_right(again)


def test_a_row_error_ends_only_that_row() -> None:
    harness = EngineHarness(num_pages=256)
    bad, good = (harness.submit([*FAMILIES[0][:12], own], max_tokens=6) for own in (1, 2))
    harness.executor.row_errors = {bad.id}
    harness.run()
    assert bad.finish_reason is FinishReason.ERROR and bad.error == "this row was told to fail"
    assert_right(good)
    assert good.finish_reason is FinishReason.LENGTH
    harness.assert_nothing_held()


@pytest.mark.parametrize("is_failed_step", [False, True])
def test_a_listener_may_abort_neighbours_of_the_same_step(is_failed_step: bool) -> None:
    """What a program does when one of its calls fails."""
    harness = EngineHarness(num_pages=256)

    def abort_all(request: Request) -> None:
        for other in harness.requests:
            harness.engine.abort(other)

    harness.submit(FAMILIES[0][:20], max_tokens=9)
    first = harness.submit([*FAMILIES[0][:12], 1], listener=FakeListener(when_finished=abort_all))
    harness.submit([*FAMILIES[0][:12], 2])
    harness.submit([3, 4, 5])
    if is_failed_step:
        harness.executor.fail_steps = {1}
    else:
        harness.executor.row_errors = {first.id}
    harness.step()
    assert all(request.is_finished for request in harness.requests)
    for request in harness.requests:
        assert_right(request)
    harness.assert_nothing_held()
    again = harness.submit(FAMILIES[0][:20], max_tokens=9)
    harness.run()
    assert_right(again)
