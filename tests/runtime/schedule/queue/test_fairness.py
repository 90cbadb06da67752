"""Weighted fair sharing between tenants: shares, latecomers, what is remembered."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_harness import EngineHarness, assert_right
from fakes import FakeListener, make_request

from stemma.errors import InvalidRequest
from stemma.runtime.config import EngineConfig
from stemma.runtime.schedule.plan import Encoding
from stemma.runtime.schedule.program_record import ProgramRecord
from stemma.runtime.schedule.queue.fairness import TenantShares, tenant_weights
from stemma.runtime.schedule.request import Request

QUANTUM = 64


def house_of(weights: dict[str, float]) -> EngineHarness:
    harness = EngineHarness(num_pages=400, max_running=4)
    shares = harness.engine.scheduler.shares
    shares.weights.update(weights)
    shares._quantum = QUANTUM
    return harness


def submit(harness: EngineHarness, tenant: str, num: int, served: Counter[str]) -> None:
    """Calls of 8 tokens and 8 more, each a program of its own."""

    def note(request: Request) -> None:
        served[tenant] += request.num_tokens

    for _ in range(num):
        number = len(harness.requests)
        prompt = [1 + number // 7**i % 7 for i in range(7, -1, -1)]
        listener = FakeListener(when_finished=note)
        program = ProgramRecord(tenant=tenant)
        harness.submit(prompt, max_tokens=8, program=program, listener=listener)


def test_tenants_with_work_share_by_weight() -> None:
    harness, served = house_of({"a": 2.0}), Counter[str]()
    submit(harness, "b", 200, served)
    submit(harness, "a", 200, served)
    most_off = 0.0
    while served["a"] < 1500:
        harness.step()
        if served["b"]:
            most_off = max(most_off, abs(served["a"] / 2 - served["b"]))
    assert 1.8 < served["a"] / served["b"] < 2.2
    assert most_off <= 2 * QUANTUM + 4 * 16  # a quantum, and what runs at once


def test_who_comes_late_has_saved_up_nothing() -> None:
    harness, served = house_of({}), Counter[str]()
    submit(harness, "early", 300, served)
    while served["early"] < 1000:
        harness.step()
    before = served["early"]
    submit(harness, "late", 200, served)
    while served["late"] < 800:
        harness.step()
        assert served["late"] - (served["early"] - before) <= 2 * QUANTUM + 4 * 16
    assert served["early"] - before > 600


def test_one_text_beside_another_tenants_hundred_is_encoded_in_the_next_step() -> None:
    """Far below a quantum of service, where the policy finds all of them equal."""
    harness = EngineHarness(num_pages=400, max_running=4)

    def submit(tenant: str) -> Request:
        program = ProgramRecord(tenant=tenant)
        return harness.submit([1, 2, 3], encoding=Encoding(), program=program)

    for _ in range(100):
        submit("batch")
    for _ in range(5):
        harness.step()
        single = submit("single")
        harness.step()
        assert single.is_finished
    assert harness.engine.scheduler.num_waiting > 60


def test_one_tenant_alone_gets_everything() -> None:
    harness, served = house_of({"b": 0.001}), Counter[str]()
    submit(harness, "b", 20, served)
    harness.run()
    assert all(len(plan.rows) == 4 for plan in harness.executor.plans[1:-8])
    for request in harness.requests:
        assert_right(request)


def test_tenants_are_remembered_only_while_somebody_has_work() -> None:
    shares = TenantShares()
    requests = [
        make_request(index, [1], program=ProgramRecord(tenant=index)) for index in range(9000)
    ]
    shares.enter(requests[0])
    for request in requests[1:]:
        shares.enter(request)
        shares.charge(request, 10.0)
        shares.leave(request)
    assert len(shares._times) <= 4097
    shares.leave(requests[0])
    assert not shares._times and not shares._num_open


def test_who_has_had_least_is_known_without_asking_all() -> None:
    shares, charged = TenantShares(quantum=1), Counter[int]()
    requests = {n: make_request(n, [1], program=ProgramRecord(tenant=n)) for n in range(20)}
    open_now: set[int] = set()
    for step in range(2000):
        number = step * 7 % 20
        if number not in open_now:
            charged[number] = max(
                charged[number], min(map(charged.__getitem__, open_now), default=0)
            )
            shares.enter(requests[number])
            open_now.add(number)
        elif step % 3:
            shares.charge(requests[number], step % 5)
            charged[number] += step % 5
        elif len(open_now) > 1:
            shares.leave(requests[number])
            open_now.remove(number)
        least = min(charged[n] for n in open_now)
        assert shares.place(number) == charged[number] - least
    assert len(shares._by_time) <= 2 * 20 + 64


def test_a_round_costs_the_same_with_many_tenants() -> None:
    """One big request has no room: whatever waits behind it is not looked at."""
    num_visits = {}
    for num_tenants in (100, 1000):
        harness = EngineHarness(num_pages=64, max_running=4)
        first = harness.submit([1] * 20, max_tokens=40)
        for tenant in range(num_tenants):
            harness.submit([2] * 40, max_tokens=20, program=ProgramRecord(tenant=tenant))
        harness.step()
        tree = harness.engine.scheduler.kv_cache.tree
        before = tree.num_visits
        for _ in range(5):
            harness.step()
        num_visits[num_tenants] = tree.num_visits - before
        assert harness.engine.scheduler.running == [first]
    assert num_visits[1000] <= num_visits[100] + 5


def test_of_many_tenants_everybody_is_served_in_turn() -> None:
    harness, served = house_of({}), Counter[str]()
    harness.engine.scheduler.shares._quantum = 8
    for tenant in range(80):  # more than a round opens at once
        submit(harness, str(tenant), 2, served)
    while len(served) < 80:
        harness.step()
    assert sum(served.values()) <= (80 + 4) * 16, "some were served again before all were once"
    harness.run()
    assert set(served.values()) == {2 * 16}


def test_weights_are_read_from_text_and_bad_ones_refused() -> None:
    assert tenant_weights("a=2,b=0.5") == {"a": 2.0, "b": 0.5}
    assert tenant_weights("") == {}
    for text in ("a", "a=x", "a=0", "=1", "a=-1", "a=nan"):
        with pytest.raises(InvalidRequest, match="tenant_weights"):
            EngineConfig(tenant_weights=text)


def test_other_policies_know_no_tenants() -> None:
    harness, served = house_of({}), Counter[str]()
    harness.engine.scheduler.policy = "fcfs"
    submit(harness, "a", 8, served)
    submit(harness, "b", 8, served)
    while served["a"] < 8 * 16:
        harness.step()
    assert served["b"] <= 4 * 16
