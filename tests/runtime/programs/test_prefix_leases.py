"""What programs lease, when, and that they let go of all of it."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from program_harness import ProgramHarness, end, fork, gen, hint, join, pause, select, text

from stemma.radix.leases import Lease
from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.programs.prefix_leases import FIRST_THINK_S, MIN_TTL_S, SOON_S, ThinkTimes


@dataclass
class Kept:
    """A lease, as it was asked for."""

    token_ids: array[int]
    due_s: float
    ttl_s: float
    priority: int


@dataclass
class FakeKV:
    """Has every prefix; records who keeps what."""

    held: dict[int, Kept] = field(default_factory=dict)
    last_uses: list[array[int]] = field(default_factory=list)
    num_made: int = 0

    def retain(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        *,
        due_s: float,
        ttl_s: float,
        priority: int = 0,
    ) -> Lease | None:
        lease = Lease(None, len(token_ids), due_s, ttl_s, priority)
        self.num_made += 1
        self.held[id(lease)] = Kept(array("i", token_ids), due_s, ttl_s, priority)
        self._alive = [*getattr(self, "_alive", []), lease]  # so that no id comes twice
        return lease

    def release_lease(self, lease: Lease, *, is_last_use: bool = False) -> None:
        kept = self.held.pop(id(lease))
        if is_last_use:
            self.last_uses.append(kept.token_ids)


@pytest.fixture
def kv() -> FakeKV:
    return FakeKV()


@pytest.fixture
def leased(context: ProgramContext, kv: FakeKV) -> ProgramHarness:
    return ProgramHarness(replace(context, kv=kv))


def dues(kv: FakeKV) -> list[float]:
    return sorted(kept.due_s for kept in kv.held.values())


def test_a_single_call_leases_nothing(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"), end=True)
    leased.generate("X")
    assert leased.is_done and kv.num_made == 0


def test_a_client_that_thinks_is_expected_after_its_usual_time(
    leased: ProgramHarness, kv: FakeKV
) -> None:
    leased.on(0, text("a"), gen("x"))
    leased.generate("X")
    assert dues(kv) == [FIRST_THINK_S]
    (kept,) = kv.held.values()
    assert kept.token_ids.tolist() == list(b"aX") and kept.ttl_s == MIN_TTL_S


def test_a_call_that_waits_is_due_now(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"), text("b"), gen("y"))
    leased.generate("X")
    assert dues(kv) == [0.0] and len(leased.prompts) == 1


@pytest.mark.parametrize(("expected_s", "ttl_s"), [(3.0, MIN_TTL_S), (100.0, 400.0)])
def test_a_pause_is_due_at_its_end(
    leased: ProgramHarness, kv: FakeKV, expected_s: float, ttl_s: float
) -> None:
    leased.on(0, text("a"), gen("x"), pause(expected_s))
    leased.generate("X")
    assert dues(kv) == [expected_s]
    assert [kept.ttl_s for kept in kv.held.values()] == [ttl_s]
    leased.on(0, text("seen"), gen("y"))
    assert dues(kv) == [0.0], "the pause has ended"


def test_a_hint_within_a_pause_does_not_end_it(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"), pause(3.0, "tool"))
    leased.generate("X")
    leased.on(0, hint("demote"))
    assert dues(kv) == [3.0]
    assert leased.context.think_times.expected_s(("", "tool")) == FIRST_THINK_S, (
        "nothing was learned yet"
    )


def test_who_waits_for_a_join_is_due_soon(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"), fork(1, 2))
    leased.generate("X")
    leased.on(0, join(1, 2))
    assert SOON_S in dues(kv)


def test_a_fork_is_kept_until_all_children_had_a_call(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"), fork(1, 2), end())
    leased.generate("X")
    leased.on(1, gen("y"), end())
    leased.on(2, gen("y"), end())
    forks = [kept for kept in kv.held.values() if kept.priority > 0]
    assert [kept.token_ids.tolist() for kept in forks] == [list(b"aX")]
    leased.generate("Y")
    assert any(kept.priority > 0 for kept in kv.held.values())
    leased.generate("Y")
    assert not kv.held


def test_what_ends_goes_first(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"))
    leased.generate("X")
    leased.on(0, end(), end=True)
    assert leased.is_done and not kv.held
    assert [ids.tolist() for ids in kv.last_uses] == [list(b"aX")]


def test_a_cancelled_program_keeps_nothing(leased: ProgramHarness, kv: FakeKV) -> None:
    leased.on(0, text("a"), gen("x"), fork(1, 2))
    leased.generate("X")
    leased.on(1, gen("y"))
    assert kv.held
    leased.session.cancel()
    leased.session.cancel()
    assert not kv.held and leased.queue.ended == [leased.session.record]


@pytest.mark.parametrize("seed", range(20))
def test_no_program_leaves_a_lease_whatever_becomes_of_its_calls(
    leased: ProgramHarness, kv: FakeKV, seed: int
) -> None:
    rng = random.Random(seed)
    numbers = itertools.count(1)
    branches = [0]
    leased.on(0, text("a"))
    for _ in range(12):
        branch = rng.choice(branches)
        match rng.randrange(5):
            case 0:
                leased.on(branch, gen("x"))
            case 1:
                leased.on(branch, select("a", "b"))
            case 2:
                leased.on(branch, pause(rng.random()))
            case 3:
                children = [next(numbers) for _ in range(rng.randrange(1, 4))]
                leased.on(branch, fork(*children))
                branches += children
            case 4:
                leased.on(branch, text("t"))
        while leased.queue.open and rng.random() < 0.7:
            finish_one(leased, rng)
    leased.send(end=True)
    while leased.queue.open:
        finish_one(leased, rng)
    assert leased.is_done and not kv.held
    assert leased.queue.ended == [leased.session.record]


def finish_one(harness: ProgramHarness, rng: random.Random) -> None:
    request = rng.choice(harness.queue.open)
    if rng.random() < 0.2:
        harness.queue.fail(request, "lost")
    elif request.scoring is not None:
        harness.queue.score(request, [0.0] * len(request.scoring.targets))
    else:
        harness.queue.generate(request, list(b"xy"))
    harness.session.advance()


def test_habits_are_running_means() -> None:
    think_times = ThinkTimes()
    assert think_times.expected_s("tool") == FIRST_THINK_S
    think_times.note("tool", 2.0)
    assert think_times.expected_s("tool") == 2.0
    think_times.note("tool", 4.0)
    assert 2.0 < think_times.expected_s("tool") <= 3.0
    assert think_times.expected_s("other") == FIRST_THINK_S
