"""Leases that hints make: each account has its own, in a namespace of its own."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

from stemma.runtime.programs import client_leases as hints_module
from stemma.runtime.programs.client_leases import Action, StatedLeases
from stemma.runtime.programs.hint_targets import HintTargets, Responses
from stemma.runtime.schedule.cache.hint_actions import Outcome
from stemma.runtime.tokenizer.tokenizer import Tokenizer

PIN = Action("pin")


class FakeLease:
    """A lease that is active until it is released."""

    def __init__(self, namespace: Hashable) -> None:
        self.namespace = namespace
        self.is_active = True


class FakeHints:
    """Pins anything; remembers which prefixes were asked for in which namespace."""

    def __init__(self) -> None:
        self.held: list[FakeLease] = []
        self.asked: list[tuple[Hashable, list[int]]] = []

    def pin(self, namespace: Hashable, token_ids: Sequence[int], ttl_s: float | None) -> Outcome:
        lease: Any = FakeLease(namespace)
        self.held.append(lease)
        self.asked.append((namespace, list(token_ids)))
        return Outcome("accepted", num_tokens=len(token_ids), lease=lease)

    def release(self, lease: FakeLease) -> None:
        assert lease.is_active, "released twice"
        lease.is_active = False
        self.held.remove(lease)


@pytest.fixture
def fake() -> FakeHints:
    return FakeHints()


@pytest.fixture
def stated(fake: FakeHints) -> StatedLeases:
    hints: Any = fake
    return StatedLeases(hints)


def num_held(fake: FakeHints, namespace: str) -> int:
    return sum(lease.namespace == namespace for lease in fake.held)


def test_who_asks_for_too_much_loses_its_own_oldest_alone(
    fake: FakeHints, stated: StatedLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "MAX_STATED", 3)
    stated.carry_out(PIN, [1], namespace="b", account="bob")
    first = stated.carry_out(PIN, [1], namespace="a", account="alice").lease
    for number in range(5):
        stated.carry_out(PIN, [number], namespace="a", account="alice")
    assert num_held(fake, "a") == 3 and num_held(fake, "b") == 1
    assert first is not None and not first.is_active
    stated.release_all()
    assert not fake.held


def test_all_accounts_together_are_bounded_and_whoever_holds_most_gives_way(
    fake: FakeHints, stated: StatedLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "MAX_STATED_IN_ALL", 6)
    for number in range(4):
        stated.carry_out(PIN, [number], namespace="a", account="alice")
    for name in ("b", "c", "d", "e"):
        stated.carry_out(PIN, [1], namespace=name, account=name)
    assert len(fake.held) == 6
    assert num_held(fake, "a") == 2 and all(num_held(fake, name) == 1 for name in "bcde")


def test_a_lease_that_has_ended_counts_no_more(
    fake: FakeHints, stated: StatedLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "MAX_STATED", 2)
    for _ in range(2):
        stated.carry_out(PIN, [1], account="alice")
    for lease in list(fake.held):
        fake.release(lease)  # as it expires
    for _ in range(2):
        stated.carry_out(PIN, [1], account="alice")
    assert len(fake.held) == 2


def test_a_response_is_a_target_within_its_own_namespace_alone(
    fake: FakeHints, stated: StatedLeases, byte_tokenizer: Tokenizer
) -> None:
    responses = Responses()
    responses.remember(("a", "r1"), array("i", [5, 6]))
    responses.remember(("b", "r1"), array("i", [7]))
    action = {"action_type": "pin", "payload": {"target": {"response_id": "r1"}}}

    def outcome(namespace: str) -> str:
        desk = HintTargets(byte_tokenizer, responses, 260, 1000, namespace, "account")
        return str(desk.carry_out([action], stated, desk.tokenized([action]))[0]["outcome"])

    assert [outcome(name) for name in ("a", "b", "c")] == ["accepted", "accepted", "missing"]
    assert fake.asked == [("a", [5, 6]), ("b", [7])]
