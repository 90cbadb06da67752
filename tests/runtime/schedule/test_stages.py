"""Plans on their way through the stages of a pipeline: whose they are, and how many."""

from __future__ import annotations

from engine_harness import EngineHarness, assert_right

from stemma.runtime.schedule.plan import StepPlan


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
