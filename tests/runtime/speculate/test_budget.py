"""Which drafts a step verifies, by what it costs and what they bring."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import hypothesis.strategies as some
import pytest

from stemma.runtime.speculate.budget import MIN_GAIN, Bid, DraftBudget
from stemma.runtime.speculate.step_times import MAX_TOKENS, PRIOR_SLOPE, StepTimes


def measured(seconds_of: Callable[[int], float], most: int = 32) -> StepTimes:
    times = StepTimes()
    for num_tokens in range(1, most + 1):
        for _ in range(6):
            times.note(num_tokens, seconds_of(num_tokens))
    return times  # not so many that one is forgotten


def test_a_curve_goes_through_what_was_measured_and_never_falls() -> None:
    times = StepTimes()
    for num_tokens, seconds in ((1, 1.0), (1, 1.1), (4, 1.3), (8, 1.2), (16, 2.0)):
        times.note(num_tokens, 9.9)  # the first of a size, which may have been set up
        times.note(num_tokens, seconds)
    curve = times.curve
    assert len(curve) == MAX_TOKENS + 1 and curve == sorted(curve)
    assert curve[1] == pytest.approx(1.0), "of few the shortest counts"
    assert curve[8] == pytest.approx(1.2)
    assert curve[4] == curve[8], "fewer tokens do not take longer"
    assert curve[12] == pytest.approx((1.2 + 2.0) / 2)
    assert curve[17] - curve[16] == pytest.approx(max(PRIOR_SLOPE * 1.0, 1.0 / 15))


def test_one_long_step_among_many_says_little() -> None:
    times = measured(lambda num_tokens: 1.0, most=64)
    for num_tokens in (4, 64):
        times.note(num_tokens, 100.0)
        assert max(times.curve) < 1.3 * PRIOR_SLOPE * MAX_TOKENS


def test_steps_that_are_too_long_for_drafts_are_not_noted() -> None:
    times = StepTimes()
    times.note(MAX_TOKENS + 1, 1.0)
    times.note(0, 1.0)
    assert times.curve == [] and times.describe() == {}


def test_where_a_token_costs_next_to_nothing_all_are_verified() -> None:
    budget = DraftBudget(measured(lambda num_tokens: 1.0 + 0.001 * num_tokens))
    assert budget.lengths(1, [Bid((0.9, 0.8, 0.7, 0.05))], 8) == [4]
    assert budget.least_chance(1, 1) < 0.01


def test_where_each_token_costs_a_step_none_is() -> None:
    budget = DraftBudget(measured(float))
    assert budget.lengths(8, [Bid((0.9, 0.8))] * 8, 64) == [0] * 8
    assert budget.least_chance(8, 8) >= 1.0


def test_drafts_stop_before_a_jump_that_the_rest_does_not_pay() -> None:
    budget = DraftBudget(measured(lambda num_tokens: 1.0 if num_tokens <= 8 else 2.4))
    assert budget.lengths(1, [Bid((0.95,) * 12)], 12) == [7]
    assert budget.lengths(8, [Bid((0.95,))] * 8, 32) == [0] * 8


def test_drafts_go_past_a_jump_that_many_of_them_pay() -> None:
    budget = DraftBudget(measured(lambda num_tokens: 1.0 if num_tokens <= 2 else 1.5))
    assert budget.lengths(1, [Bid((0.98, 0.96, 0.94, 0.92))], 8) == [4]


def test_the_likelier_and_the_weightier_come_first() -> None:
    budget = DraftBudget(measured(lambda num_tokens: 1.0 if num_tokens <= 5 else 9.0))
    likely, unlikely = Bid((0.9, 0.8, 0.7)), Bid((0.3, 0.2, 0.1))
    assert budget.lengths(2, [unlikely, likely], 8) == [0, 3]
    assert budget.lengths(2, [Bid(unlikely.chances, weight=3.0), likely], 8) == [1, 2]


def test_each_small_size_is_tried_until_it_is_known() -> None:
    """Else the time of the largest, which alone was measured, would be that of all."""
    times = StepTimes()
    budget = DraftBudget(times)
    times.note(9, 1.0)
    times.note(9, 1.0)
    tried = set()
    for _ in range(60):
        num_taken = sum(budget.lengths(1, [Bid((0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01))], 8))
        tried.add(num_taken)
        times.note(1 + num_taken, 0.1 * (1 + num_taken))
    assert tried == set(range(9))
    assert times.curve[1] == pytest.approx(0.1)
    assert budget.lengths(1, [Bid((0.7, 0.5, 0.3))], 8) == [0], "each token costs a step"


def test_what_could_bring_little_is_not_tried() -> None:
    times = StepTimes()
    for _ in range(6):
        times.note(4, 1.0)
    budget = DraftBudget(times)
    assert budget.lengths(4, [Bid((0.05, 0.03))] * 4, 64) == [0] * 4
    assert sum(budget.lengths(4, [Bid((0.5, 0.4, 0.3))] * 4, 64)) > 0


def test_what_was_measured_long_ago_is_tried_again() -> None:
    times = measured(lambda num_tokens: 1.0 if num_tokens == 1 else 9.0, most=8)
    budget = DraftBudget(times)
    bid = Bid((0.9, 0.8))
    assert budget.lengths(1, [bid], 8) == [0]
    found = 0
    for _ in range(5000):  # two tokens take no longer any more
        num_taken = sum(budget.lengths(1, [bid], 8))
        found += num_taken == 2
        times.note(1 + num_taken, 1.0)
    assert found > 2000 and budget.lengths(1, [bid], 8) == [2]


@pytest.mark.parametrize("num_rows", [20, 40])
def test_a_step_without_drafts_stays_known_where_each_has_had_some(num_rows: int) -> None:
    """Else it would take the time of those with drafts, which then look free for ever."""
    times = measured(lambda num_tokens: 1.0, most=24)
    times.note(200, 1.0)
    times.note(200, 1.0)
    budget = DraftBudget(times)
    bids = [Bid((0.9, 0.8, 0.7, 0.6))] * num_rows
    for _ in range(4000):
        times.note(num_rows + sum(budget.lengths(num_rows, bids, MAX_TOKENS)), 1.0)
    bids = [Bid((0.2, 0.04))] * num_rows
    num_drafts = []
    for _ in range(4000):  # each token costs as much as any other now
        num_drafts.append(sum(budget.lengths(num_rows, bids, MAX_TOKENS)))
        times.note(num_rows + num_drafts[-1], float(num_rows + num_drafts[-1]))
    assert sum(num_drafts[2000:]) < 100


def test_what_is_measured_never_exceeds_the_room() -> None:
    budget = DraftBudget(StepTimes())
    assert budget.lengths(1, [Bid((0.9,) * 8)], 3) == [3]
    assert budget.lengths(MAX_TOKENS - 2, [Bid((0.9,) * 8)], 99) == [2]
    assert budget.lengths(1, [Bid((0.9,))], 0) == [0]


@hypothesis.given(
    some.lists(some.floats(0.001, 1.0), min_size=64, max_size=64),
    some.lists(
        some.tuples(some.lists(some.floats(0.0, 1.0), max_size=5), some.floats(0.5, 4.0)),
        min_size=1,
        max_size=4,
    ),
    some.integers(0, 12),
)
def test_no_other_choice_brings_more_tokens_a_second(
    rises: list[float], drafts: list[tuple[list[float], float]], room: int
) -> None:
    """By trying all numbers of the best tokens, with the curve as it was fitted."""
    seconds = [sum(rises[: i + 1]) for i in range(64)]
    times = measured(lambda num_tokens: seconds[num_tokens - 1])
    bids = []
    for confidences, weight in drafts:
        chances, chance = [], 1.0
        for confidence in confidences:
            chance *= confidence
            chances.append(chance)
        bids.append(Bid(tuple(chances), weight))
    num_tokens = len(bids)
    lengths = DraftBudget(times).lengths(num_tokens, bids, room)
    assert sum(lengths) <= room
    base = sum(bid.weight for bid in bids)

    def rate(chosen: list[int]) -> float:
        worth = sum(bid.weight * sum(bid.chances[:n]) for bid, n in zip(bids, chosen))
        return (base + worth) / times.curve[num_tokens + sum(chosen)]

    offers = sorted(
        (-bid.weight * chance, i) for i, bid in enumerate(bids) for chance in bid.chances
    )
    best = rate([0] * len(bids)) * MIN_GAIN
    for count in range(1, min(room, len(offers)) + 1):
        chosen = [sum(i == place for _, i in offers[:count]) for place in range(len(bids))]
        best = max(best, rate(chosen))
    assert rate(lengths) >= best * (1 - 1e-9) or not any(lengths)
