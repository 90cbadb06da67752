"""Placement policies, and the load that they weigh, by hand."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

import pytest

from stemma.cluster.placement.load import (
    ROW_TOKENS,
    AllHabits,
    Habits,
    ProgramLoad,
    ReplicaLoad,
)
from stemma.cluster.placement.moves import better_home, is_crowded
from stemma.cluster.placement.policies import PLACEMENTS, Newcomer, expected_s, policy_of
from stemma.cluster.placement.spread import ForkedWork, spread
from stemma.cluster.prompt_text import max_tokens_of


@dataclass
class Replica:
    number: int
    num_calls: int = 0
    expected_tokens: float = 0.0
    room_tokens: float = 10_000.0
    prompt_token_s: float = 1e-3
    row_tokens: float = 4.0

    def expected_before(self, tenant: Hashable, num_tokens: float) -> float:
        return self.expected_tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_policy_chooses_one_of_the_candidates_and_changes_none(name: str) -> None:
    policy, replicas = policy_of(name), [Replica(3), Replica(5, 2), Replica(8)]
    before = [repr(each) for each in replicas]
    for size in (1, 2, 3):
        for number in range(8):
            newcomer = Newcomer(100.0, {5: 60.0}, f"key {number}", b"text")
            assert policy(newcomer, replicas[:size]) in replicas[:size]
    assert [repr(each) for each in replicas] == before


def test_a_program_goes_where_its_prefix_is_unless_that_takes_longer() -> None:
    policy = policy_of("program")
    there, idle = Replica(0, expected_tokens=300.0), Replica(1)
    assert policy(Newcomer(1000.0, {0: 900.0}), [there, idle]) is there
    assert policy(Newcomer(1000.0, {0: 200.0}), [there, idle]) is idle


def test_a_tenant_waits_for_no_more_of_another_one_than_it_wants_itself() -> None:
    total = ReplicaLoad()
    flood = [ProgramLoad(Habits(), Clock(), tenant="flood") for _ in range(10)]
    mine = ProgramLoad(Habits(), Clock(), tenant="mine")
    for each in (*flood, mine):
        each.enter(total, 100.0)
        each.begin_call()
    one = mine.expected_tokens
    assert total.ahead_of("flood", 50.0) == pytest.approx(10 * one + one)
    assert total.ahead_of("mine", 50.0) == pytest.approx(one + (one + 50.0))
    assert total.ahead_of("new", 50.0) == pytest.approx(2 * 50.0)
    for each in flood:
        each.leave()
    assert total.ahead_of("mine", 50.0) == pytest.approx(one) and set(total.tenants) == {"mine"}


def test_who_weighs_more_waits_for_less_of_the_others() -> None:
    total = ReplicaLoad(weights={"big": 4.0})
    flood = [ProgramLoad(Habits(), Clock(), tenant="flood") for _ in range(10)]
    big = ProgramLoad(Habits(), Clock(), tenant="big")
    for each in (*flood, big):
        each.enter(total, 100.0)
        each.begin_call()
    one = big.expected_tokens
    assert total.ahead_of("big", 50.0) == pytest.approx(one + (one + 50.0) / 4)
    assert total.ahead_of("new", 20.0) == pytest.approx(5 * 20.0)
    big.leave()
    assert total.ahead_of("big", 20.0) == pytest.approx(20.0 / 4)
    assert total.ahead_of("new", 20.0) == pytest.approx(20.0)


def test_what_all_replicas_have_counts_for_nothing() -> None:
    policy = policy_of("program")
    busy, idle = Replica(0, expected_tokens=50.0), Replica(1)
    assert policy(Newcomer(1000.0, {0: 800.0, 1: 800.0}), [busy, idle]) is idle


def test_a_full_replica_costs_what_would_be_displaced() -> None:
    full, roomy = Replica(0, room_tokens=100.0), Replica(1)
    newcomer = Newcomer(1000.0, {}, expected_tokens=500.0)
    assert expected_s(newcomer, full) == pytest.approx(1.0 + 1.4)
    assert expected_s(newcomer, roomy) == pytest.approx(1.0)


def test_keys_keep_their_replica_when_another_comes_or_goes() -> None:
    policy = policy_of("consistent_hash")
    replicas = [Replica(number) for number in range(5)]
    homes = {key: policy(Newcomer(1.0, key=key), replicas).number for key in range(1000)}
    fewer = {key: policy(Newcomer(1.0, key=key), replicas[:4]).number for key in range(1000)}
    moved = [key for key in homes if homes[key] != fewer[key]]
    assert all(homes[key] == 4 for key in moved) and 100 < len(moved) < 320


def test_an_agent_between_two_calls_still_counts() -> None:
    clock = Clock()
    habits = Habits()
    total = ReplicaLoad()
    program = ProgramLoad(habits, clock)
    program.enter(total, 400.0)
    program.begin_call()
    assert total.num_calls == 1 and total.expected_tokens > 400
    clock.now_s = 1.0
    program.end_call(500, 50)
    assert total.num_calls == 0 and total.held_tokens == 550 and 0 < total.expected_tokens < 300
    clock.now_s = 10.0
    program.begin_call()
    program.end_call(600, 50)
    assert habits.busy_share < 1.0, "nine seconds of thought were noted"
    program.end()
    left = (total.num_calls, total.expected_tokens, total.held_tokens)
    assert left == pytest.approx((0.0, 0.0, 0.0))


def test_a_call_counts_with_no_more_than_it_may_generate() -> None:
    total = ReplicaLoad()
    program = ProgramLoad(Habits(), Clock())
    program.enter(total, 100.0)
    program.begin_call(max_tokens=8)
    assert program.output_tokens == 8 and total.expected_tokens == 100 + 8 * ROW_TOKENS
    assert max_tokens_of(["gen", 0, 1, None, "x", {"max_tokens": 8, "n": 3}]) == 24
    for untold in ({}, {"max_tokens": "8"}, None):
        assert max_tokens_of(["gen", 0, 1, None, "x", untold]) == inf


def test_a_call_that_was_lost_with_its_replica_leaves_nothing_there() -> None:
    lost, other = ReplicaLoad(), ReplicaLoad()
    program = ProgramLoad(Habits(), Clock())
    program.enter(lost, 10.0)
    program.begin_call()
    program.leave()
    program.enter(other, 10.0)
    program.begin_call()
    assert lost.num_calls == 0 and abs(lost.expected_tokens) < 1e-9 and other.num_calls == 1


def test_habits_of_many_kinds_are_bounded() -> None:
    habits = AllHabits()
    first = habits.of("line 0")
    for number in range(1, 5000):
        habits.of(f"line {number}")
    assert habits.of("line 0") is not first and habits.of("line 4999") is habits.of("line 4999")


def at_rest_at(here: Replica, held_tokens: int) -> ProgramLoad:
    """A program that waits there, of which nothing is expected."""
    load = ProgramLoad(Habits(output_tokens=0.0))
    load.enter(ReplicaLoad(), 0.0)
    load.begin_call()
    load.end_call(held_tokens, 0)
    return load


def test_a_program_moves_where_that_pays_with_a_margin() -> None:
    busy, idle = Replica(0, expected_tokens=2100.0), Replica(1)
    assert is_crowded(busy, [idle]) and not is_crowded(idle, [busy])
    assert better_home(at_rest_at(busy, 1000), busy, [idle]) is idle
    assert better_home(at_rest_at(busy, 1100), busy, [idle]) is None, "it holds too much"
    assert better_home(at_rest_at(busy, 1100), busy, [idle], token_share=0.1) is idle, "fetched"
    assert better_home(at_rest_at(idle, 1000), idle, [busy]) is None
    assert better_home(at_rest_at(busy, 10), busy, []) is None


def test_a_program_moves_from_a_replica_that_cannot_hold_all_to_one_that_can() -> None:
    over, roomy, full = Replica(0, room_tokens=-5000.0), Replica(1), Replica(2, room_tokens=0.0)
    load = at_rest_at(over, 4000)
    assert better_home(load, over, [roomy], token_share=0.1) is roomy
    assert better_home(load, over, [full], token_share=0.1) is None, "others would lose as much"
    assert better_home(load, over, [roomy]) is None, "computing it there costs as much as here"


def test_branches_stay_with_their_prefix_until_they_have_enough_to_do() -> None:
    home, other = Replica(0), Replica(1)
    wide = ForkedWork(1000.0, [10.0] * 16, [128.0] * 16, {0: 1000.0})
    chosen = spread(wide, home, [other])
    assert chosen.count(home) > chosen.count(other) > 4
    small = ForkedWork(1000.0, [10.0] * 4, [16.0] * 4, {0: 1000.0})
    assert spread(small, home, [other]) == [home] * 4
    cached = ForkedWork(1000.0, [10.0] * 16, [64.0] * 16, {0: 1000.0, 1: 1000.0})
    assert spread(cached, home, [other]).count(other) == 8


def test_branches_stay_where_one_more_row_costs_nothing_or_it_is_not_known() -> None:
    wide = ForkedWork(1000.0, [0.0] * 16, [64.0] * 16)
    cheap = Replica(0, row_tokens=0.1)
    assert spread(wide, cheap, [Replica(1)]) == [cheap] * 16
    unknown = Replica(0, row_tokens=0.0)
    assert spread(wide, unknown, [Replica(1)]) == [unknown] * 16
    assert spread(wide, Replica(0), []) == [Replica(0)] * 16


def test_branches_go_to_no_replica_that_is_busier_or_has_no_room() -> None:
    wide = ForkedWork(1000.0, [0.0] * 16, [64.0] * 16)
    busy, full = Replica(1, expected_tokens=1e6), Replica(2, room_tokens=-1e6)
    assert spread(wide, Replica(0), [busy]) == [Replica(0)] * 16
    assert full not in spread(ForkedWork(9000.0, [0.0] * 16, [64.0] * 16), Replica(0), [full])
