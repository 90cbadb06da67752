"""A queue whose owners take turns."""

from __future__ import annotations

import threading
from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from stemma.turn_queue import TurnQueue

HANGS_S = 60.0


@given(some.lists(some.one_of(some.integers(0, 3), some.none())))
def test_each_keeps_its_order_and_waits_for_at_most_one_item_of_each_other(
    steps: list[int | None],
) -> None:
    """An integer: its owner puts an item in; None: one is taken."""
    turns: TurnQueue[tuple[int, int]] = TurnQueue()
    num_put, num_taken = Counter[int](), Counter[int]()
    taken_since = {owner: Counter[int]() for owner in range(4)}  # its item became its first
    for owner in steps:
        if owner is not None:
            if num_put[owner] == num_taken[owner]:
                taken_since[owner].clear()
            turns.put((owner, num_put[owner]), owner)
            num_put[owner] += 1
        elif len(turns):
            taken = turns.take()
            assert taken is not None and taken[1] == num_taken[taken[0]]
            num_taken[taken[0]] += 1
            for each, since in taken_since.items():
                since[taken[0]] += each != taken[0]
            taken_since[taken[0]].clear()
        waiting = [each for each in range(4) if num_put[each] > num_taken[each]]
        assert all(max(taken_since[each].values(), default=0) <= 1 for each in waiting)
        assert len(turns) == (num_put - num_taken).total()


def test_who_waits_for_an_item_has_it_once_it_comes_and_none_once_closed() -> None:
    turns: TurnQueue[str] = TurnQueue()
    taken: list[str | None] = []
    thread = threading.Thread(target=lambda: taken.extend((turns.take(), turns.take())))
    thread.start()
    turns.put("a", "alice")
    while len(turns):
        pass
    turns.close()
    turns.put("b", "bob")
    thread.join(HANGS_S)
    assert taken == ["a", None] and turns.take() is None and len(turns) == 1
