"""A tenant's share of rows, pages and tokens beside one that floods the engine, as a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from engine_harness import EngineHarness, assert_right
from fakes import FakeListener

from stemma.runtime.schedule.program_record import ProgramRecord
from stemma.runtime.schedule.request import Request

QUANTUM = 256  # as many tokens a row as there are on an engine of 128 rows


def jain(amounts: Sequence[float]) -> float:
    """Jain's index: 1 where all are equal, 1 / n where one has everything."""
    return sum(amounts) ** 2 / (len(amounts) * sum(amount**2 for amount in amounts))


class Tenants:
    """Tenants that keep so many requests each under way, on one engine."""

    def __init__(self, harness: EngineHarness) -> None:
        self.harness = harness
        harness.engine.scheduler.shares._quantum = QUANTUM
        self.num_tokens: Counter[str] = Counter()  # generated
        self.num_ended: Counter[str] = Counter()
        self.most_steps: Counter[str] = Counter()  # of a request, from its coming to its end
        self.num_steps = 0
        self._number = 0

    def ask(self, tenant: str, num_prompt: int, num_output: int, *, repeats: bool) -> Request:
        """A request; with `repeats` another one like it once it has ended."""
        self._number += 1
        number, came = self._number, self.num_steps
        prompt = [1 + (number // 7**i + i // 8) % 7 for i in range(num_prompt)]

        def on_token(request: Request) -> None:
            self.num_tokens[tenant] += 1

        def on_end(request: Request) -> None:
            self.num_ended[tenant] += 1
            self.most_steps[tenant] = max(self.most_steps[tenant], self.num_steps - came)
            if repeats:
                self.ask(tenant, num_prompt, num_output, repeats=True)

        listener = CountingListener(on_token, on_end)
        program = ProgramRecord(tenant=tenant)
        return self.harness.submit(
            prompt, max_tokens=num_output, program=program, listener=listener, stop_ids=frozenset()
        )

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.num_steps += 1
            self.harness.engine.step()  # checked once, at the end: the runs are long
        self.harness.step()


class CountingListener(FakeListener):
    """Tells of each token, too."""

    def __init__(self, on_token: object, on_end: object) -> None:
        super().__init__(when_finished=on_end)
        self._tell = on_token

    def on_token(self, request: Request, result: object) -> object:
        self._tell(request)
        return super().on_token(request, result)


@pytest.mark.parametrize("has_overlap", [False, True])
@pytest.mark.parametrize(
    "num_steps", [400, pytest.param(20_000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_a_key_has_its_share_beside_one_that_floods(num_steps: int, has_overlap: bool) -> None:
    """The flood: 4 requests of n=64, long ones, always as many. Beside it a key that asks for 16
    tokens in 2 requests at a time, far below its share: it has what it has alone, within a fifth.
    """
    alone, beside = (
        Tenants(EngineHarness(num_pages=20_000, max_running=16, has_overlap=has_overlap))
        for _ in range(2)
    )
    for _ in range(256):
        beside.ask("flood", 12, 400, repeats=True)
    beside.run(50)
    for tenants in (alone, beside):
        before = tenants.num_tokens.total()
        for _ in range(2):
            tenants.ask("good", 12, 16, repeats=True)
        tenants.run(num_steps)
        assert tenants.num_tokens.total() > before
    ratio = beside.num_tokens["good"] / alone.num_tokens["good"]
    assert ratio > 0.8, f"{ratio:.2f} of what it has alone"
    assert beside.most_steps["good"] <= 1.5 * alone.most_steps["good"] + 4, "of any request"
    assert beside.num_tokens["flood"] > 0.7 * 14 * num_steps, "the rest is the flood's"


def test_who_wants_more_than_there_is_has_as_much_as_the_others() -> None:
    """One floods with long requests; the others have enough short ones to use their shares, of
    which one's is three times as large."""
    weight = 3.0
    tenants = Tenants(EngineHarness(num_pages=20_000, max_running=16))
    tenants.harness.engine.scheduler.shares.weights["b"] = weight
    for _ in range(64):
        tenants.ask("flood", 12, 400, repeats=True)
    tenants.run(50)
    for tenant in "bcd":
        for _ in range(16):
            tenants.ask(tenant, 12, 16, repeats=True)
    tenants.num_tokens.clear()
    tenants.run(600)
    each = {t: tenants.num_tokens[t] / (weight if t == "b" else 1.0) for t in ("flood", *"bcd")}
    assert jain(list(each.values())) > 0.95, each


def test_pages_that_one_holds_are_given_to_another_up_to_its_share() -> None:
    harness = EngineHarness(num_pages=400, max_running=16, token_budget=64)
    tenants = Tenants(harness)
    hogs = [tenants.ask("hog", 60, 60, repeats=False) for _ in range(5)]
    tenants.run(12)
    assert len(harness.engine.scheduler.running) == 3, "there are pages for three"
    small = tenants.ask("small", 90, 8, repeats=False)
    tenants.run(14)
    assert small.is_finished, "it waits for nobody's 60 tokens"
    assert not any(hog.is_finished for hog in hogs)
    harness.run()
    for request in harness.requests:
        assert_right(request)
    harness.assert_nothing_held()


def test_nobody_is_preempted_for_what_is_more_than_a_share() -> None:
    harness = EngineHarness(num_pages=400, max_running=16, token_budget=64)
    tenants = Tenants(harness)
    tenants.ask("a", 150, 100, repeats=False)
    tenants.ask("a", 150, 100, repeats=False)
    tenants.run(10)
    tenants.ask("b", 300, 8, repeats=False)  # of 400, and its share is 200
    harness.run()
    assert harness.engine.scheduler.stats.num_preemptions == 0


def test_one_that_runs_in_every_row_gives_one_row_and_is_not_asked_again() -> None:
    harness = EngineHarness(num_pages=400, max_running=4)
    tenants = Tenants(harness)
    for _ in range(4):
        tenants.ask("flood", 8, 60, repeats=False)
    tenants.run(5)
    tenants.ask("good", 8, 20, repeats=False)
    tenants.run(10)
    scheduler = harness.engine.scheduler
    assert scheduler.stats.num_preemptions == 1 and len(scheduler.running) == 4
    harness.run()
    assert scheduler.stats.num_preemptions == 1
    for request in harness.requests:
        assert_right(request)


def test_a_tenant_alone_is_never_preempted_for_a_share() -> None:
    tenants = Tenants(EngineHarness(num_pages=20_000, max_running=4))
    for _ in range(40):
        tenants.ask("one", 8, 20, repeats=False)
    tenants.harness.run()
    assert tenants.harness.engine.scheduler.stats.num_preemptions == 0
