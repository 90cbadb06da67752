"""A limit that several share: against a plain model, and what each may count on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stemma.shared_limit import SharedLimit, most_of_one

STEPS = some.lists(some.tuples(some.integers(0, 5), some.integers(1, 40), some.booleans()))


@given(limit=some.integers(1, 200), base=some.integers(1, 200), steps=STEPS)
def test_amounts_add_up_and_who_is_refused_is_let_in_once_so_much_came_back(
    limit: int, base: int, steps: list[tuple[int, int, bool]]
) -> None:
    base = min(base, limit)
    shared, held = SharedLimit(), Counter[int]()
    for owner, num, is_taken in steps:
        if not is_taken:
            num = min(num, held[owner])
            shared.give_back(owner, num)
            held[owner] -= num
            continue
        missing = shared.num_missing(owner, num, limit, base)
        if not missing:
            shared.take(owner, num)
            held[owner] += num
            assert held[owner] <= most_of_one(limit, base)
        elif 0 < missing <= held[owner]:
            shared.give_back(owner, missing)
            held[owner] -= missing
            assert not shared.num_missing(owner, num, limit, base)
        assert shared.num_used == held.total() <= limit
        assert all(shared.used_by(each) == held[each] for each in range(6))


def test_the_greedy_have_equal_parts_and_leave_as_much_to_who_comes_next() -> None:
    shared, limit = SharedLimit(), 1200
    greedy = range(5)
    for _ in range(limit):  # what they had is given back in turn, and taken by whoever may
        for owner in greedy:
            while not shared.num_missing(owner, 1, limit):
                shared.take(owner, 1)
        for owner in greedy:
            if shared.used_by(owner) > 1:
                shared.give_back(owner, 1)
    assert all(190 <= shared.used_by(owner) <= 210 for owner in greedy)
    assert not shared.num_missing("late", 95, limit)


@pytest.mark.parametrize(("limit", "base", "most"), [(1, 1, 1), (4224, 128, 2112), (130, 128, 128)])
def test_one_alone_may_have_half_and_what_runs_at_once(limit: int, base: int, most: int) -> None:
    shared = SharedLimit()
    assert not shared.num_missing("one", most, limit, base)
    shared.take("one", most)
    assert shared.num_missing("one", 1, limit, base)
    if limit > base:
        assert not shared.num_missing("another", 1, limit, base)
