"""Plans on their way through the stages of a pipeline: whose they are, and how many."""

from __future__ import annotations

from engine_harness import EngineHarness, assert_right

from stemma.runtime.schedule.plan import StepPlan
from stemma.runtime.schedule.queue.prompt_limits import share_of_stage


def ids(plan: StepPlan) -> set[int]:
    return {row.request_id for row in plan.rows}


def test_requests_that_decode_are_divided_between_the_stages() -> None:
    harness = EngineHarness(num_stages=2)
    requests = [harness.submit([1, 2, 3 + i], max_tokens=12) for i in range(5)]
    pending: list[set[int]] = []
    while harness.engine.has_work:
        harness.step()
        in_flight = [ids(step.plan) for step in harness.executor.pending]
        assert sum(map(len, in_flight)) == len(set().union(*in_flight)), "a request is in two plans"
        if all(request.num_output_tokens for request in requests):
            pending += in_flight
    assert {len(rows) for rows in pending[:8]} <= {2, 3}, "each has its half"
    for request in requests:
        assert_right(request)
    harness.assert_nothing_held()


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    harness = EngineHarness(num_stages=3, token_budget=8, num_pages=128)
    request = harness.submit(list(range(1, 41)), max_tokens=2)
    for _ in range(4):
        harness.step()
    starts = [step.plan.rows[0].start for step in harness.executor.pending]
    assert starts == [8, 16, 24], "the first one's result is in, three are on their way"
    harness.run()
    assert_right(request)


def test_a_request_that_ends_while_it_is_in_flight_is_not_in_the_way() -> None:
    harness = EngineHarness(num_stages=2, num_pages=24)
    first, second = (harness.submit([1, 2, 3 + i], max_tokens=30) for i in range(2))
    while first.num_output_tokens < 4:
        harness.step()
    harness.engine.abort(first)
    third = harness.submit([9, 8, 7], max_tokens=8)
    harness.run()
    assert_right(second)
    assert_right(third)
    harness.assert_nothing_held()


def test_who_lacks_a_page_is_not_left_behind_by_those_before_it() -> None:
    harness = EngineHarness(num_stages=2, page_size=16, num_pages=14, is_hopeful=True)
    requests = [harness.submit([1 + i, 2, 2, 2], max_tokens=60) for i in range(6)]
    num_plans = dict.fromkeys(requests, 0)  # since its last token
    while harness.engine.has_work:
        before = {request: request.num_output_tokens for request in requests}
        num_before = len(harness.executor.plans)
        harness.step()
        for request in requests:
            is_kept = request.num_output_tokens == before[request]
            if is_kept and request in harness.engine.scheduler.running:
                num_plans[request] += len(harness.executor.plans) - num_before
            else:
                num_plans[request] = 0
        assert max(num_plans.values()) <= 3, "a plan of others each, and one that preempts"
    assert harness.engine.scheduler.stats.num_preemptions
    for request in requests:
        assert_right(request)


def test_plans_have_room_for_all_that_decode() -> None:
    assert 2 * share_of_stage(2048, 2, 2048) >= 2048
    assert share_of_stage(2048, 2, 128) == 512
