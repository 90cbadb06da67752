"""Requests that wait for their adapters' slots: whom they hold up, and what they cost meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.radix.tree import RadixTree
from stemma.runtime.checkpoint.lora.adapter import Adapter
from stemma.runtime.schedule.queue.adapter_slots import AdapterSlots
from stemma.runtime.schedule.queue.policy import OutputShare, PolicyContext, policy_of
from stemma.runtime.schedule.queue.waiting_queue import WaitingQueue
from stemma.runtime.schedule.request import Request

ADAPTERS = tuple(Adapter(name, Path(name), name, 1, None) for name in "abcde")


class Queue:
    """A waiting queue before slots that are taken by hand."""

    def __init__(
        self, num_slots: int, policy: str = "fcfs", max_overtakes: int | None = None
    ) -> None:
        self.slots = AdapterSlots(num_slots, lambda slot, adapter: None)
        self.tree = RadixTree()
        around = PolicyContext(self.tree, OutputShare())
        self.waiting = WaitingQueue(policy_of(policy), around, max_overtakes, adapters=self.slots)
        self.num_made = 0

    def add(self, adapter: Adapter | None) -> Request:
        self.num_made += 1
        request = make_request(self.num_made, [1, self.num_made], adapter=adapter)
        self.waiting.add(request)
        return request

    def offered(self) -> list[Request]:
        return list(self.waiting.candidates())


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from(["fcfs", "program"]),
    st.lists(
        st.tuples(st.sampled_from(["add", "remove", "acquire", "release"]), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_a_round_offers_those_that_have_a_slot_or_need_none_in_order(
    num_slots: int, policy: str, events: list[tuple[str, int]]
) -> None:
    queue = Queue(num_slots, policy)
    running: list[Adapter] = []
    for kind, number in events:
        adapter = None if number >= len(ADAPTERS) else ADAPTERS[number]
        waiting = list(queue.waiting)
        if kind == "add":
            queue.add(adapter)
        elif kind == "remove" and waiting:
            queue.waiting.remove(waiting[number % len(waiting)])
        elif kind == "acquire" and adapter and queue.slots.has_room(adapter.revision):
            queue.slots.acquire(adapter)
            running.append(adapter)
        elif kind == "release" and running:
            queue.slots.release(running.pop(number % len(running)))
        expected = [
            request
            for request in queue.waiting
            if request.adapter is None or queue.slots.has_room(request.adapter.revision)
        ]
        assert queue.offered() == expected


def test_a_slot_that_is_taken_in_a_round_is_not_offered_again() -> None:
    queue = Queue(1)
    first, second, again, base = (queue.add(a) for a in (*ADAPTERS[:2], ADAPTERS[0], None))
    offered = []
    for request in queue.waiting.candidates():
        offered.append(request)
        if request.adapter is not None:
            queue.slots.acquire(request.adapter)
            queue.waiting.remove(request)
    assert offered == [first, again, base]
    assert queue.offered() == [base]
    for _ in range(2):
        queue.slots.release(ADAPTERS[0])
    assert queue.offered() == [second, base]


@pytest.mark.parametrize("num_adapters", [1, 1000])
def test_thousands_that_wait_for_a_slot_are_not_looked_at(
    num_adapters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(1, "lpm")
    queue.slots.acquire(ADAPTERS[0])
    others = [Adapter(f"x{i}", Path("x"), f"x{i}", 1, None) for i in range(num_adapters)]
    for index in range(3000):
        queue.add(others[index % num_adapters])
    base = queue.add(None)
    assert queue.offered() == [base]
    looks: list[str] = []
    has_room = queue.slots.has_room
    monkeypatch.setattr(queue.slots, "has_room", lambda r: looks.append(r) or has_room(r))
    num_visits = queue.tree.num_visits
    for _ in range(10):
        assert queue.offered() == [base]
    assert len(looks) <= 10 * policy_of("lpm").num_refreshed
    assert queue.tree.num_visits - num_visits <= 10 * 3 * policy_of("lpm").num_refreshed


def test_who_was_parked_for_the_working_set_waits_for_a_slot_first() -> None:
    """And is not offered before it has one, nor are those of its adapter behind it."""
    queue = Queue(1, "program")
    parked = [queue.add(ADAPTERS[1]) for _ in range(3)]
    for request in queue.waiting.candidates():
        queue.waiting.park(request)
    assert queue.offered() == parked and queue.waiting.is_parked(parked[0])
    queue.slots.acquire(ADAPTERS[0])
    base = queue.add(None)
    assert queue.offered() == [base]
    queue.slots.release(ADAPTERS[0])
    assert set(queue.offered()) == {*parked, base}


@pytest.mark.parametrize("is_preempted", [True, False])
def test_one_that_nobody_may_overtake_has_the_next_slot(is_preempted: bool) -> None:
    """Whoever else's adapter is on the device; those without one are offered meanwhile."""
    queue = Queue(1, "lpm", max_overtakes=0)
    queue.slots.acquire(ADAPTERS[0])
    if is_preempted:
        queue.waiting.put_back(make_request(99, [1], adapter=ADAPTERS[1]))
    else:
        queue.add(ADAPTERS[1])
        queue.waiting.remove(queue.add(None))  # no other may now
    queue.add(ADAPTERS[0])
    base = queue.add(None)
    candidates = queue.waiting.candidates()
    first = next(candidates)
    assert first.adapter is ADAPTERS[1] and not queue.waiting.has_slot(first)
    assert list(candidates) == ([base] if is_preempted else [])  # a line does not pass its due one
    queue.slots.release(ADAPTERS[0])
    assert queue.waiting.has_slot(next(queue.waiting.candidates()))
