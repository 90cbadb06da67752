"""Requests under a grammar: masks, jump-forward, grammars that come late; on a scripted device."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right, listener_of
from fakes import STOP_ID, VOCAB_SIZE, FakeListener, ScriptedGrammar, ScriptedMatcher
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.serving.grammar_state import GrammarFailure, PendingGrammar
from stemma.constrained.serving.parsed_output import ParsedOutput
from stemma.constrained.serving.parser_host import position_of
from stemma.constrained.serving.positions import Position
from stemma.runtime.schedule.request import FinishReason, Request

STOP_IDS = frozenset({STOP_ID})
RUN = (1, 2, 3, 4, 5, 6)


def compiled(grammar: ScriptedGrammar) -> PendingGrammar:
    return PendingGrammar(bound=grammar)


@dataclass(slots=True, eq=False)
class ParsedElsewhere(PendingGrammar):
    """A grammar that is followed as by another process, which answers so many steps later."""

    answer_steps: int = 0
    asked: list[tuple[int, ParsedOutput]] = field(default_factory=list)
    clock: int = 0

    def follower(self, jump_forward: bool, stop_ids: frozenset[int]) -> ParsedOutput:
        return ParsedOutput(self, self.position_after([]), jump_forward, stop_ids)

    def ask(self, output: ParsedOutput) -> None:
        self.asked.append((self.clock + self.answer_steps, output))

    def forget(self, output: ParsedOutput) -> None:
        self.asked = [item for item in self.asked if item[1] is not output]

    def tick(self) -> None:
        self.clock += 1
        for item in [item for item in self.asked if item[0] < self.clock]:
            self.asked.remove(item)
            item[1].take(self.position_after(item[1].tokens))

    def position_after(self, tokens: list[int]) -> Position:
        assert self.bound is not None
        matcher = self.bound.matcher()  # type: ignore[union-attr]
        assert all(map(matcher.consume, tokens))
        return position_of(matcher, -(-VOCAB_SIZE // 32))


def random_grammar(seed: int) -> ScriptedGrammar:
    """Chains of forced tokens between branchings; the last of its states is final."""
    rng = random.Random(seed)
    num_states = rng.randrange(2, 14)
    moves: list[dict[int, int]] = []
    for state in range(num_states - 1):
        num_moves = rng.choice([1, 1, 1, 2, 3])
        tokens = rng.sample(range(1, VOCAB_SIZE), num_moves)
        moves.append({token: rng.randrange(num_states) for token in tokens})
        moves[-1][tokens[0]] = state + 1  # so that the end can be reached
    moves.append({})
    accepting = {state for state in range(num_states) if rng.random() < 0.2}
    return ScriptedGrammar(tuple(moves), frozenset(accepting | {num_states - 1}))


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.builds(
                lambda family, shared, own: FAMILIES[family][:shared] + own,
                st.integers(0, 2),
                st.integers(1, 40),
                st.lists(st.integers(1, 2), max_size=4),
            ),
            "max_tokens": st.integers(1, 24),
            "seed": st.none() | st.integers(0, 10**6),
            "jump_forward": st.booleans(),
            "stop_ids": st.sampled_from([frozenset(), STOP_IDS]),
            "stop_after": st.none() | st.integers(1, 9),
            "steps_before": st.integers(0, 3),
            "compile_steps": st.integers(0, 6),
            "answer_steps": st.none() | st.integers(0, 4),
        }
    ),
    min_size=1,
    max_size=7,
)
HOUSES = st.builds(
    EngineHarness,
    num_pages=st.sampled_from([72, 200]),
    token_budget=st.sampled_from([1, 3, 16, 64]),
    max_running=st.sampled_from([1, 2, 8]),
    is_hopeful=st.booleans(),
) | st.builds(
    EngineHarness,
    num_pages=st.sampled_from([5, 20]),
    page_size=st.just(16),
    token_budget=st.sampled_from([16, 17, 64]),
    max_running=st.sampled_from([1, 3, 8]),
    is_hopeful=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(HOUSES, REQUESTS)
def test_outputs_are_those_of_sampling_each_token_alone_whatever_the_workload(
    harness: EngineHarness, given: list[dict[str, object]]
) -> None:
    """Jumps, chunks, late grammars, late answers of parsers, cuts and preemption change no
    token."""
    late: list[tuple[int, PendingGrammar, ScriptedGrammar]] = []
    clock = 0
    for fields in given:
        fields = dict(fields)
        seed, compile_steps = fields.pop("seed"), fields.pop("compile_steps")
        answer_steps = fields.pop("answer_steps")
        listener = FakeListener(stop_after=fields.pop("stop_after"))  # type: ignore[arg-type]
        for _ in range(int(fields.pop("steps_before"))):  # type: ignore[call-overload]
            clock = _tick(harness, late, clock)
        grammar = None
        if seed is not None:
            grammar = PendingGrammar()
            if answer_steps is not None:
                grammar = ParsedElsewhere(answer_steps=int(answer_steps))  # type: ignore[call-overload]
            late.append((clock + int(compile_steps), grammar, random_grammar(seed)))  # type: ignore[call-overload]
        harness.submit(listener=listener, grammar=grammar, **fields)  # type: ignore[arg-type]
    while late:
        clock = _tick(harness, late, clock)
    while any(not request.is_finished for request in harness.requests):
        clock = _tick(harness, late, clock)
        assert clock < 5000
    for request in harness.requests:
        assert_right(request)
        assert request.finish_reason is not FinishReason.ERROR
    harness.assert_nothing_held()


def _tick(
    harness: EngineHarness, late: list[tuple[int, PendingGrammar, ScriptedGrammar]], clock: int
) -> int:
    """A step, after the grammars and answers that are due."""
    for request in harness.requests:
        if isinstance(request.grammar, ParsedElsewhere):
            request.grammar.tick()
    for item in [item for item in late if item[0] <= clock]:
        late.remove(item)
        item[1].bound = item[2]
    harness.step()
    return clock + 1


def test_forced_tokens_are_computed_in_one_step_and_one_by_one_without_jump_forward() -> None:
    steps = {}
    for jump_forward in (True, False):
        harness = EngineHarness()
        grammar = compiled(ScriptedGrammar.of((1, *RUN, 1), (2, *RUN, 2)))
        request = harness.submit([3], max_tokens=20, grammar=grammar, jump_forward=jump_forward)
        harness.run()
        assert_right(request)
        assert request.finish_reason is FinishReason.STOP and request.num_output_tokens == 8
        steps[jump_forward] = len(harness.executor.plans)
    assert steps == {True: 1, False: 8}


def test_a_forced_beginning_is_computed_with_the_prompt() -> None:
    harness = EngineHarness()
    grammar = compiled(ScriptedGrammar.of((*RUN, 1), (*RUN, 2)))
    request = harness.submit(FAMILIES[0][:20], max_tokens=20, grammar=grammar)
    harness.run()
    assert [plan.num_tokens for plan in harness.executor.plans] == [20 + len(RUN)]
    assert_right(request)
    assert request.num_cached_tokens == 0 and request.num_prompt_tokens == 20


def test_an_output_that_is_wholly_forced_costs_no_step() -> None:
    harness = EngineHarness()
    request = harness.submit([1, 2], grammar=compiled(ScriptedGrammar.of(RUN)), max_tokens=9)
    assert harness.engine.has_work
    harness.step()
    assert not harness.executor.plans and not harness.engine.has_work
    assert list(request.output_ids) == list(RUN) and request.finish_reason is FinishReason.STOP
    harness.assert_nothing_held()


@pytest.mark.parametrize("max_tokens", [1, 3, 6, 7])
def test_a_forced_run_is_cut_at_max_tokens(max_tokens: int) -> None:
    harness = EngineHarness()
    grammar = ScriptedGrammar.of((1, *RUN), (2, *RUN))
    request = harness.submit([5], max_tokens=max_tokens, grammar=compiled(grammar))
    harness.run()
    assert_right(request)
    assert request.num_output_tokens == max_tokens
    ended = FinishReason.STOP if max_tokens == 7 else FinishReason.LENGTH
    assert request.finish_reason is ended


def test_a_listener_may_stop_inside_a_forced_run() -> None:
    harness = EngineHarness()
    grammar = ScriptedGrammar.of((1, *RUN), (2, *RUN))
    listener = FakeListener(stop_after=3)
    request = harness.submit([5], max_tokens=9, grammar=compiled(grammar), listener=listener)
    harness.run()
    assert request.num_output_tokens == 3 and request.finish_reason is FinishReason.STOP
    assert_right(request)
    harness.assert_nothing_held()


def test_stop_tokens_come_only_where_the_grammar_accepts() -> None:
    loop = ({1: 1, 2: 1}, {1: 2, 2: 2}, {1: 0, 2: 0})
    num_stopped = 0
    for seed in range(40):
        harness = EngineHarness()
        grammar = compiled(ScriptedGrammar(loop, frozenset({2})))
        request = harness.submit([seed % 8, 3], max_tokens=30, grammar=grammar, stop_ids=STOP_IDS)
        harness.run()
        assert_right(request)
        if request.finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert request.num_output_tokens % 3 == 2
    assert num_stopped > 5


def test_the_prompt_is_computed_but_for_its_last_token_while_the_grammar_is_compiled() -> None:
    harness = EngineHarness(num_pages=128)
    grammar = PendingGrammar()
    request = harness.submit(FAMILIES[0][:30], grammar=grammar)
    harness.step()
    assert request.num_computed_tokens == 29
    assert not harness.engine.has_work, "nothing to do until the grammar comes"
    twin = harness.submit(FAMILIES[0][:30], grammar=grammar)
    other = harness.submit(FAMILIES[1][:30], max_tokens=2)
    harness.run()
    assert twin.num_cached_tokens == 29 and not twin.is_finished
    assert_right(other)
    grammar.bound = ScriptedGrammar.of((1,), (2,))
    assert harness.engine.has_work
    harness.step()
    assert harness.executor.plans[-1].num_tokens == 2
    assert_right(request)
    assert_right(twin)
    harness.assert_nothing_held()


def test_a_grammar_that_cannot_be_compiled_ends_its_requests_alone() -> None:
    harness = EngineHarness(num_pages=128)
    grammar = PendingGrammar()
    failing = [harness.submit(FAMILIES[0][:10], grammar=grammar) for _ in range(3)]
    healthy = harness.submit(FAMILIES[0][:10])
    harness.step()
    grammar.failure = GrammarFailure("no such language", "UnsupportedSchema")
    harness.run()
    for request in failing:
        assert request.finish_reason is FinishReason.ERROR
        assert (request.error, request.error_kind) == ("no such language", "UnsupportedSchema")
        assert listener_of(request).num_finishes == 1 and not request.output_ids
    assert_right(healthy)
    harness.assert_nothing_held()


def test_a_request_aborted_while_its_grammar_is_compiled_holds_nothing() -> None:
    harness = EngineHarness()
    grammar = PendingGrammar()
    request = harness.submit(FAMILIES[0][:10], grammar=grammar)
    harness.step()
    harness.engine.abort(request)
    grammar.bound = ScriptedGrammar.of((1,))
    harness.run()
    assert request.finish_reason is FinishReason.ABORT
    harness.assert_nothing_held()


def test_a_request_aborted_while_a_parser_computes_holds_nothing_and_delays_nobody() -> None:
    harness = EngineHarness()
    grammar = ParsedElsewhere(answer_steps=1000, bound=ScriptedGrammar(({1: 0, 2: 0},)))
    stuck = harness.submit(FAMILIES[0][:10], grammar=grammar)
    healthy = harness.submit(FAMILIES[0][:10])
    harness.run()
    assert_right(healthy)
    assert stuck.num_output_tokens == 1 and not stuck.is_finished and grammar.asked
    harness.engine.abort(stuck)
    assert stuck.finish_reason is FinishReason.ABORT and not grammar.asked
    harness.assert_nothing_held()


def test_a_matcher_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for jump_forward in (True, False):
        harness = EngineHarness()
        grammar = ScriptedGrammar(({1: 0, 2: 0},))
        failing = harness.submit([1], grammar=compiled(grammar), jump_forward=jump_forward)
        healthy = harness.submit([1, 1], grammar=compiled(grammar), jump_forward=jump_forward)
        harness.step()
        assert failing.follower is not None
        monkeypatch.setattr(failing.follower._matcher, "fail_after", 1, raising=False)
        harness.run()
        assert failing.finish_reason is FinishReason.ERROR
        assert "told to fail" in (failing.error or "") and failing.error_kind == "InvalidGrammar"
        assert_right(healthy)
        harness.assert_nothing_held()


@pytest.mark.parametrize("verb", ["mask", "consume", "forced_tokens", "is_finished", "error"])
def test_a_matcher_that_raises_ends_its_request_alone(verb: str) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of its mind")

    harness = EngineHarness()
    grammar = compiled(ScriptedGrammar(({1: 1, 2: 1}, {1: 0, 2: 0})))
    failing = harness.submit([1], grammar=grammar)
    healthy = harness.submit([1, 1], grammar=grammar)
    harness.step()
    assert failing.follower is not None
    setattr(failing.follower._matcher, verb, fail)
    harness.run()
    assert failing.finish_reason is FinishReason.ERROR and "mind" in (failing.error or "")
    assert_right(healthy)
    harness.assert_nothing_held()


def test_a_token_that_the_grammar_refuses_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot happen while masks are obeyed; if it does, nobody else pays for it."""
    monkeypatch.setattr(ScriptedMatcher, "consume", lambda self, token_id: False)
    harness = EngineHarness()
    broken = harness.submit([1], grammar=compiled(ScriptedGrammar.of((1,), (2,))))
    healthy = harness.submit([1])
    harness.run()
    assert broken.finish_reason is FinishReason.ERROR and "grammar" in (broken.error or "")
    assert_right(healthy)
    harness.assert_nothing_held()


def test_samples_of_one_prompt_follow_the_grammar_each_for_itself() -> None:
    harness = EngineHarness(num_pages=200)
    grammar = compiled(random_grammar(8))
    requests: list[Request] = []
    for jump_forward in (True, False, True):
        requests.append(
            harness.submit(
                FAMILIES[2][:20], max_tokens=30, grammar=grammar, jump_forward=jump_forward
            )
        )
    harness.run()
    for request in requests:
        assert_right(request)
    assert len({request.follower for request in requests}) == 3
