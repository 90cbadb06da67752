"""The policies' order, the waiting queue's aging and bounded cost."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right
from fakes import FakeListener, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.errors import InvalidRequest
from stemma.radix.tree import RadixTree
from stemma.runtime.config import EngineConfig
from stemma.runtime.schedule.queue.policy import POLICY_NAMES, OutputShare, PolicyContext, policy_of
from stemma.runtime.schedule.queue.waiting_queue import WaitingQueue
from stemma.runtime.schedule.request import FinishReason, Request, Scoring


class QueueHarness:
    """A waiting queue over a tree of its own."""

    def __init__(self, policy: str, max_overtakes: int | None = None) -> None:
        self.tree = RadixTree()
        self.share = OutputShare()
        around = PolicyContext(self.tree, self.share)
        self.queue = WaitingQueue(policy_of(policy), around, max_overtakes)
        self.num_made = 0

    def add(self, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Request:
        self.num_made += 1
        request = make_request(self.num_made, prompt, **fields)
        request.max_output_tokens = max_tokens
        self.queue.add(request)
        return request

    def cache(self, prompt: list[int]) -> None:
        self.tree.insert("", prompt, range(1000, 1000 + len(prompt)))

    def admit(self) -> Request | None:
        request = next(self.queue.candidates(), None)
        if request is not None:
            self.queue.remove(request)
        return request

    def drain(self) -> list[int]:
        order = []
        while (request := self.admit()) is not None:
            order.append(request.id)
        assert not len(self.queue)
        return order


# --- order ----------------------------------------------------------------------------------------


def test_fcfs_admits_in_order_of_arrival() -> None:
    harness = QueueHarness("fcfs")
    harness.cache([1, 2, 3])
    for prompt in ([9], [1, 2, 3, 4], [8]):
        harness.add(prompt)
    assert harness.drain() == [1, 2, 3]


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    harness = QueueHarness("lpm")
    harness.cache([1, 2, 3, 4, 5])
    for prompt in ([9, 9], [1, 2, 7], [1, 2, 3, 4, 7], [9, 8], [1, 2, 6]):
        harness.add(prompt)
    assert harness.drain() == [3, 2, 5, 1, 4]


def test_lpm_sees_what_was_cached_while_a_request_waited() -> None:
    harness = QueueHarness("lpm")
    harness.add([9, 9])
    harness.add([1, 2, 3])
    list(harness.queue.candidates())
    harness.cache([1, 2])
    assert harness.drain() == [2, 1]


def test_lpm_sees_what_was_evicted_while_a_request_waited() -> None:
    """Also when it is not that request's turn to be ranked again."""
    harness = QueueHarness("lpm")
    harness.cache([5, 6, 7])
    harness.cache([1, 2])
    ids = {harness.add([4, index]).id: index for index in range(100)}
    hot, warm = harness.add([5, 6, 7, 8]), harness.add([1, 2, 3])
    assert next(harness.queue.candidates()) is hot
    harness.tree.evict(3)
    assert next(harness.queue.candidates()) is warm
    assert harness.drain() == [warm.id, *ids, hot.id]


def test_dfs_weight_goes_depth_first_into_the_fullest_branch() -> None:
    harness = QueueHarness("dfs-weight")
    for prompt in ([7, 1], [5, 1, 1], [6, 1], [5, 2, 1], [6, 2], [5, 1, 2], [5, 2, 2], [5, 2, 3]):
        harness.add(prompt)
    # Branch 5 has five, and in it branch 2 three; 6 has two, 7 one.
    assert harness.drain() == [4, 7, 8, 2, 6, 3, 5, 1]


def test_dfs_weight_keeps_namespaces_apart() -> None:
    harness = QueueHarness("dfs-weight")
    for index in range(6):
        harness.add([5, index], namespace="ab"[index % 2])
    assert harness.drain() == [1, 3, 5, 2, 4, 6]


def test_priority_admits_the_highest_first_then_in_order_of_arrival() -> None:
    harness = QueueHarness("priority")
    for priority in (0, 5, -3, 5, 0):
        harness.add([1], priority=priority)
    assert harness.drain() == [2, 4, 1, 5, 3]


def test_sjf_admits_what_is_expected_to_generate_least() -> None:
    harness = QueueHarness("sjf")
    for max_tokens in (30, 10, 20):
        harness.add([1], max_tokens)
    scored = harness.add([1], 0, scoring=Scoring(0, (1,)))
    assert harness.drain() == [scored.id, 2, 3, 1]


def test_sjf_corrects_max_tokens_by_what_a_client_really_uses() -> None:
    harness = QueueHarness("sjf")
    for _ in range(64):
        request = make_request(0, [1], client="brief")
        request.max_output_tokens = 100
        request.append_token(1)
        harness.share.note(request)
    assert harness.share.of("brief") < 0.1
    honest = harness.add([1], 40, client="other")
    brief = harness.add([1], 100, client="brief")
    harness.share.overall.value = 1.0
    assert harness.drain() == [brief.id, honest.id]


# --- switching and limits -------------------------------------------------------------------------


def test_an_unknown_policy_is_refused_with_the_names_there_are() -> None:
    harness = EngineHarness()
    for make in (
        lambda: EngineConfig(schedule_policy="lifo"),
        lambda: setattr(harness.engine.scheduler, "policy", "lifo"),
    ):
        with pytest.raises(InvalidRequest, match=r"schedule_policy='lifo'.*fcfs.*dfs-weight.*sjf"):
            make()
    assert harness.engine.scheduler.policy == "program"


def test_a_policy_can_be_switched_while_requests_wait() -> None:
    harness = QueueHarness("fcfs")
    for priority in (0, 1, 2, 3):
        harness.add([1], priority=priority)
    assert harness.admit() is not None
    for name, expected in (("priority", 4), ("fcfs", 2), ("dfs-weight", 3)):
        harness.queue.policy = policy_of(name)
        request = harness.admit()
        assert request is not None and request.id == expected


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_gives_the_same_outputs(policy: str) -> None:
    rng = random.Random(3)
    harness = EngineHarness(
        num_pages=120, max_running=4, token_budget=24, policy=policy, is_hopeful=True
    )
    for _ in range(40):
        prompt = FAMILIES[rng.randrange(3)][: rng.randrange(1, 40)]
        harness.submit(prompt, max_tokens=rng.randrange(1, 30), priority=rng.randrange(3))
        if rng.random() < 0.5:
            harness.step()
    harness.run()
    for request in harness.requests:
        assert_right(request)
        assert request.finish_reason is FinishReason.LENGTH
    harness.assert_nothing_held()


def test_lpm_looks_at_a_bounded_number_of_nodes_a_round_however_many_wait() -> None:
    num_visits = {}
    for num_waiting in (500, 4000):
        harness = QueueHarness("lpm", max_overtakes=128)
        for index in range(num_waiting):
            harness.add([index % 7, index])
        harness.admit()
        before = harness.tree.num_visits
        for index in range(400):
            harness.cache([index % 7, index])
            harness.admit()
        num_visits[num_waiting] = harness.tree.num_visits - before
    assert num_visits[4000] <= 2 * num_visits[500]


def test_what_has_left_the_queue_is_forgotten() -> None:
    harness = QueueHarness("lpm")
    harness.add([9])
    harness.cache([1])
    for index in range(2000):
        harness.add([1, index])
        harness.admit()
    (kept_queue,) = harness.queue._queues.values()
    sizes = (
        *kept_queue._heaps.values(),
        kept_queue._to_refresh,
        kept_queue._unranked,
        kept_queue._items,
        kept_queue._arrivals,
    )
    assert len(harness.queue) == 1 and all(len(kept) < 200 for kept in sizes)


# --- aging ----------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["fcfs", "lpm", "dfs-weight", "sjf", "program"]),
    st.integers(0, 5),
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 3)),
            st.tuples(st.just("admit"), st.just(0)),
            st.tuples(st.just("abort"), st.integers(0, 9)),
        ),
        max_size=80,
    ),
)
def test_nobody_is_overtaken_more_often_than_the_bound(
    policy: str, max_overtakes: int, events: list[tuple[str, int]]
) -> None:
    harness = QueueHarness(policy, max_overtakes)
    for index in range(3):
        harness.cache([index] * 4)
    num_overtakes: dict[int, int] = {}
    longest = 0

    def admit() -> None:
        request = harness.admit()
        if request is not None:
            del num_overtakes[request.id]
            for other in num_overtakes:
                num_overtakes[other] += other < request.id
            bound = max_overtakes + longest
            assert all(num <= bound for num in num_overtakes.values())

    for kind, what in events:
        if kind == "add":
            longest = max(longest, len(harness.queue))
            request = harness.add([what] * (1 + harness.num_made % 5), 1 + harness.num_made % 11)
            num_overtakes[request.id] = 0
        elif kind == "admit":
            admit()
        elif waiting := list(harness.queue):
            request = waiting[what % len(waiting)]
            harness.queue.remove(request)
            del num_overtakes[request.id]
    while len(harness.queue):
        admit()


def _flood(policy: str, max_overtakes: int | None) -> list[bool]:
    """Whether each first admission is the cold request's; hot ones never stop coming."""
    harness = EngineHarness(num_pages=400, max_running=2, policy=policy)
    harness.engine.scheduler.waiting._max_overtakes = max_overtakes
    hot = FAMILIES[0][:60]
    harness.submit(hot, max_tokens=1)
    harness.run()
    order: list[Request] = []
    cold: Request | None = None
    for index in range(60):
        for own in range(3):
            listener = FakeListener(when_finished=order.append)
            harness.submit([*hot, own, index % 7], max_tokens=1, listener=listener)
        if index == 5:
            listener = FakeListener(when_finished=order.append)
            cold = harness.submit(FAMILIES[1][:20], max_tokens=1, listener=listener)
        harness.step()
    return [request is cold for request in order]


def test_a_cold_request_starves_under_a_flood_without_aging_and_not_with_it() -> None:
    assert True not in _flood("lpm", None)
    served = _flood("lpm", 10)
    in_order = _flood("fcfs", None)
    assert 0 < served.index(True) <= 2 * in_order.index(True) + 10


# --- preemption -----------------------------------------------------------------------------------


def test_under_priority_the_lowest_is_preempted() -> None:
    harness = EngineHarness(num_pages=60, max_running=3, policy="priority", is_hopeful=True)
    low = harness.submit([1] * 8, max_tokens=40, priority=-1)
    harness.step()
    high = [harness.submit([own] * 8, max_tokens=20, priority=1) for own in (2, 3)]
    preempted: set[int] = set()
    while harness.engine.has_work:
        harness.step()
        preempted |= {r.id for r in harness.engine.scheduler.waiting if r.is_admitted}
    assert preempted == {low.id}
    for request in (low, *high):
        assert_right(request)


# --- sharing and aborts ---------------------------------------------------------------------------


def test_an_unrelated_prompt_fills_what_a_cut_chunk_leaves_of_the_budget() -> None:
    harness = EngineHarness(num_pages=64, page_size=16, token_budget=23)
    first, second = (harness.submit([*FAMILIES[1][:64], own], max_tokens=1) for own in (1, 2))
    other = harness.submit([7] * 12, max_tokens=1)
    harness.step()
    (plan,) = harness.executor.plans
    assert {row.request_id for row in plan.rows} == {first.id, other.id}
    assert plan.num_tokens == 23
    harness.run()
    assert harness.executor.num_computed == 64 + 2 + 12
    for request in (first, second, other):
        assert_right(request)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_abort_frees_slot_and_pages_for_the_very_next_step(policy: str) -> None:
    harness = EngineHarness(num_pages=40, max_running=1, token_budget=64, policy=policy)
    running = harness.submit(FAMILIES[0][:30], max_tokens=10)
    harness.step()
    waiting = harness.submit(FAMILIES[1][:38], max_tokens=1)
    harness.engine.abort(running)
    harness.step()
    assert waiting.finish_reason is FinishReason.LENGTH
    harness.assert_nothing_held()
