"""Random work with drafts, right and wrong ones: the same outputs, nothing leaked.

The scripted device checks that each input's KV is that of the request's own text and drafts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right
from fakes import FakeListener, ScriptedExecutor, ScriptedGrammar, expected_output
from hypothesis import given, settings
from hypothesis import strategies as st
from random_work import assert_all_right, constrained, events, failing, houses, play
from scripted_drafters import (
    Guess,
    ScriptedDrafter,
    ScriptedText,
    always_wrong,
    oracle,
    sometimes_right,
    speculate,
)

from stemma.constrained.serving.grammar_state import GrammarState, PendingGrammar
from stemma.errors import OutOfPages
from stemma.runtime.schedule.cache.kv_cache import KVCacheOptions
from stemma.runtime.schedule.guess import Guess as GuessedTree
from stemma.runtime.schedule.plan import Row, RowResult, StepPlan
from stemma.runtime.schedule.program_record import ProgramRecord
from stemma.runtime.schedule.request import FinishReason, Request
from stemma.runtime.speculate.budget import Bid
from stemma.runtime.speculate.drafter import Draft, Side, Subject

HOUSES = houses(kv_cache=st.sampled_from([None, KVCacheOptions(num_host_pages=40)]))


class Knowing(ScriptedDrafter):
    """Knows what each request will say."""

    def __init__(self, guess: Guess) -> None:
        super().__init__({}, guess)
        self.texts: list[ScriptedText] = []

    def open(self, subject: Subject) -> ScriptedText:
        assert isinstance(subject, Request)
        grammar = None if subject.grammar is None else subject.grammar.bound
        assert grammar is None or isinstance(grammar, ScriptedGrammar)
        output, _ = expected_output(
            subject.prompt, subject.max_output_tokens, subject.stop_ids, grammar
        )
        self.texts.append(ScriptedText(output, self._guess))
        return self.texts[-1]


GUESSES = st.one_of(
    st.just(oracle), st.just(always_wrong), st.randoms().map(lambda rng: sometimes_right(rng))
)


@settings(max_examples=150, deadline=None)
@given(HOUSES, events(constrained()), GUESSES, st.integers(1, 9))
def test_outputs_are_those_without_drafts_whatever_the_workload(
    harness: EngineHarness, work: list[tuple[str, object]], guess: Guess, max_drafts: int
) -> None:
    drafter = Knowing(guess)
    speculation = speculate(harness.engine, drafter, max_drafts)
    play(harness, work)
    assert_all_right(harness)
    for request in harness.requests:
        assert 0 <= request.num_accepted_tokens <= request.num_drafted_tokens
    assert not speculation._texts and not speculation._verified
    assert all(text.num_closed == 1 for text in drafter.texts)


@settings(max_examples=100, deadline=None)
@given(failing(HOUSES), events(constrained()))
def test_failed_steps_and_rows_with_drafts_leak_nothing_and_spoil_nobody_else(
    harness: EngineHarness, work: list[tuple[str, object]]
) -> None:
    speculation = speculate(harness.engine, Knowing(sometimes_right(random.Random(3))))
    play(harness, work)
    assert_all_right(harness)
    assert not speculation._texts and not speculation._verified


@pytest.mark.parametrize("page_size", [1, 16])
def test_an_oracle_saves_all_steps_but_one_in_seven(page_size: int) -> None:
    harness = EngineHarness(num_pages=200, page_size=page_size, max_running=1)
    speculate(harness.engine, Knowing(oracle), max_drafts=6)
    request = harness.submit(FAMILIES[0][:20], max_tokens=70)
    harness.run()
    assert_right(request)
    assert len(harness.executor.plans) == 10, "the first one reads the prompt, and drafts too"
    assert request.num_drafted_tokens == request.num_accepted_tokens == 60


def test_what_was_wrong_keeps_no_page() -> None:
    harness = EngineHarness(num_pages=100, max_running=1)
    speculate(harness.engine, Knowing(always_wrong), max_drafts=6)
    request = harness.submit(FAMILIES[0][:20], max_tokens=10)
    for _ in range(5):
        harness.step()
        assert len(request.pages) == request.num_tokens
    harness.run()
    assert_right(request)
    assert request.num_accepted_tokens == 0 < request.num_drafted_tokens


def test_of_a_tree_the_tokens_most_likely_right_are_verified() -> None:
    sides = (Side(-1, 7, 0.3), Side(3, 8, 0.9), Side(0, 9, 0.1), Side(1, 2, 1.0))
    draft = Draft((4, 5, 6), (0.6, 0.5, 0.5), sides=sides)
    guess = GuessedTree(parts=[(ScriptedText((), oracle), draft, 0)])
    guess.extend(draft.tokens, draft.chances)
    guess.add_sides(stop_ids={2})
    assert guess.bid(0.1, 1.0).chances == pytest.approx([0.6, 0.3, 0.3, 0.27, 0.15])
    num_own, beside = guess.first(4)
    assert num_own == 2 and [side.path for side in beside] == [(7,), (7, 8)]
    assert guess.first(6)[0] == 3 and guess.first(6)[1][-1].path == (4, 9)


def test_no_lease_is_broken_for_a_guess() -> None:
    """Of 32 pages 20 are leased; the prompt and its output need 11, with all guesses 15."""
    harness = EngineHarness(num_pages=32, max_running=1)
    harness.submit(FAMILIES[0][:20], max_tokens=1)
    harness.run()
    cache = harness.engine.scheduler.kv_cache
    assert cache.retain("", FAMILIES[0][:20], due_s=0.0, ttl_s=600.0) is not None
    speculate(harness.engine, Knowing(oracle), max_drafts=6)
    listener = FakeListener(stop_after=2)
    request = harness.submit(FAMILIES[1][:9], max_tokens=20, listener=listener)
    harness.run()
    assert_right(request)
    assert cache.tree.leased_pages == 20 and len(cache.leases) == 1


def test_forced_runs_within_a_draft_are_not_sampled() -> None:
    """{a} 1 2 {b} 3 4 {c}: the model decides three times, and drafts know what it says."""
    texts = [(a, 1, 2, b, 3, 4, c) for a in (5, 6, 7) for b in (8, 9) for c in (10, 11)]
    harness = EngineHarness(num_pages=64, max_running=1)
    speculate(harness.engine, Knowing(oracle), max_drafts=8)
    grammar = PendingGrammar(ScriptedGrammar.of(*texts))
    request = harness.submit(FAMILIES[1][:9], max_tokens=20, grammar=grammar)
    harness.run()
    assert_right(request)
    (plan,) = harness.executor.plans
    (row,) = plan.rows
    assert row.num_drafts == 6 and row.sampled_at == (8, 11, 14)
    assert request.num_drafted_tokens == request.num_accepted_tokens == 2, "forced ones are none"
    assert plan.masks is not None and len(plan.masks) == 4


def test_what_follows_a_forced_run_is_drawn_again_where_its_draw_behind_drafts_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """{a} 1 2 {b} 3 4 {c}, and no result behind the 2, though all drafts are right."""
    draw = ScriptedExecutor._draw
    failed: list[int] = []

    def failing(self: ScriptedExecutor, row: Row, plan: StepPlan, at: int, chain: int) -> RowResult:
        if at == 1 and not failed:
            failed.append(row.request_id)
            return RowResult(error="not finite")
        return draw(self, row, plan, at, chain)

    monkeypatch.setattr(ScriptedExecutor, "_draw", failing)
    texts = [(a, 1, 2, b, 3, 4, c) for a in (5, 6, 7) for b in (8, 9) for c in (10, 11)]
    harness = EngineHarness(num_pages=64, max_running=1)
    speculate(harness.engine, Knowing(lambda follows: follows[:3]), max_drafts=3)
    grammar = PendingGrammar(ScriptedGrammar.of(*texts))
    request = harness.submit(FAMILIES[1][:9], max_tokens=20, grammar=grammar)
    harness.run()
    assert failed == [request.id]
    assert_right(request)


def test_a_grammar_forbids_a_draft_before_it_is_computed() -> None:
    harness = EngineHarness(num_pages=64, max_running=1)
    speculate(harness.engine, Knowing(lambda follows: [30, *follows[1:]]))
    grammar = PendingGrammar(ScriptedGrammar.of((1, 2, 4), (3, 2, 5)))
    request = harness.submit(FAMILIES[1][:9], grammar=grammar)
    harness.run()
    assert_right(request)
    assert request.num_drafted_tokens == 0


def test_under_a_grammar_that_is_not_walked_ahead_nothing_is_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that another process follows, where that was not asked ahead."""
    monkeypatch.setattr(GrammarState, "look_ahead", lambda self: None)
    harness = EngineHarness(num_pages=64, max_running=1)
    speculate(harness.engine, Knowing(oracle))
    grammar = PendingGrammar(ScriptedGrammar.of((1, 2, 4), (3, 2, 5)))
    request = harness.submit(FAMILIES[1][:9], grammar=grammar, jump_forward=False)
    harness.run()
    assert_right(request)
    assert request.num_drafted_tokens == 0


@pytest.mark.parametrize("number", range(2, 13))
def test_a_page_that_cannot_be_had_costs_a_guess_alone(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = EngineHarness(num_pages=64, max_running=1)
    speculate(harness.engine, Knowing(oracle))
    request = harness.submit(FAMILIES[1][:9], max_tokens=30)
    allocator = harness.engine.scheduler.kv_cache.allocator
    allocate, num_calls = allocator.allocate, 0

    def allocate_or_fail(num_pages: int) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number:
            raise OutOfPages("this allocation was told to fail")
        return allocate(num_pages)

    monkeypatch.setattr(allocator, "allocate", allocate_or_fail)
    harness.run()
    assert_right(request)


@pytest.mark.parametrize(
    ("fields", "weight"),
    [({}, 1.0), ({"priority": -1}, 1.0), ({"priority": 1}, 2.0), ({"deadline_s": 1e9}, 2.0)],
)
def test_guesses_for_who_is_urgent_or_has_a_deadline_weigh_twice(
    fields: dict[str, object], weight: float
) -> None:
    harness = EngineHarness(num_pages=200)
    found = weights_of(harness)
    harness.submit(FAMILIES[0][:9], max_tokens=9, **fields)
    harness.run()
    assert {weight for weights in found for weight in weights} == {weight}


def weights_of(harness: EngineHarness) -> list[list[float]]:
    """Those of each step's requests, from now on."""
    speculation = speculate(harness.engine, Knowing(oracle))
    found: list[list[float]] = []
    choose = speculation._budget.lengths

    def lengths(num_tokens: int, bids: Sequence[Bid], room: int) -> list[int]:
        found.append([bid.weight for bid in bids])
        return choose(num_tokens, bids, room)

    speculation._budget.lengths = lengths  # type: ignore[method-assign]
    return found


def test_guesses_for_the_branch_that_others_wait_for_weigh_more() -> None:
    harness = EngineHarness(num_pages=200)
    found = weights_of(harness)
    one, other = ProgramRecord("one"), ProgramRecord("other")
    for max_tokens, program in ((8, one), (24, one), (16, one), (8, other)):
        harness.submit(FAMILIES[0][:9], max_tokens=max_tokens, program=program)
    harness.run()
    assert [0.5, 1.0, 0.5, 1.0] in found
    assert found[-1] == [1.0], "it is alone in the end"


def test_a_listener_that_ends_a_request_amid_its_drafts_has_the_last_word() -> None:
    harness = EngineHarness(num_pages=64)
    speculate(harness.engine, Knowing(oracle))
    listener = FakeListener(stop_after=3)
    stopped = harness.submit(FAMILIES[2][:9], max_tokens=20, listener=listener)
    aborted = harness.submit(FAMILIES[2][:9], max_tokens=20, listener=Aborting(harness, 3))
    harness.run()
    assert len(stopped.output_ids) == 3 and stopped.finish_reason is FinishReason.STOP
    assert len(aborted.output_ids) == 3 and aborted.finish_reason is FinishReason.ABORT
    harness.assert_nothing_held()


class Aborting(FakeListener):
    """Aborts its request after some tokens."""

    def __init__(self, harness: EngineHarness, after: int) -> None:
        super().__init__()
        self._harness = harness
        self._after = after

    def on_token(self, request: Request, result: object) -> FinishReason | None:
        reason = super().on_token(request, result)  # type: ignore[arg-type]
        if len(self.tokens) == self._after:
            self._harness.engine.abort(request)
        return reason


def test_who_is_never_right_is_asked_more_and_more_rarely() -> None:
    harness = EngineHarness(num_pages=200, max_running=1)
    speculate(harness.engine, Knowing(always_wrong), max_drafts=1)
    request = harness.submit(FAMILIES[0][:9], max_tokens=100)
    harness.run()
    assert_right(request)
    assert 10 <= request.num_drafted_tokens <= 20


def test_who_is_right_again_is_asked_in_each_step() -> None:
    is_wrong = True

    def guess(follows: Sequence[int]) -> Sequence[int]:
        return always_wrong(follows) if is_wrong else follows

    harness = EngineHarness(num_pages=200, max_running=1)
    speculate(harness.engine, Knowing(guess), max_drafts=1)
    request = harness.submit(FAMILIES[0][:9], max_tokens=120)
    for _ in range(60):
        harness.step()
    is_wrong = False
    harness.run()
    assert_right(request)
    assert 15 <= request.num_accepted_tokens <= 30, "each second token of the last 60, but a few"
