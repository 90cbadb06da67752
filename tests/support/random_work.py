"""Random work for an engine on the scripted device: arrivals, departures and changes."""

from __future__ import annotations

import random

from engine_harness import FAMILIES, EngineHarness, assert_right
from fakes import STOP_ID, VOCAB_SIZE, FakeListener, ScriptedGrammar
from hypothesis import strategies as st

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.errors import PromptTooLong
from stemma.runtime.schedule.queue.policy import POLICY_NAMES
from stemma.runtime.schedule.request import FinishReason, HiddenSum, Scoring

STOP_IDS = frozenset({STOP_ID})


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """A prefix of one of three families and a few tokens of its own: much is shared."""
    family = draw(st.sampled_from(FAMILIES))
    shared = family[: draw(st.integers(0, 40))]
    return (shared + draw(st.lists(st.integers(1, 2), max_size=6))) or [1]


@st.composite
def submissions(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    prompt = draw(prompts())
    if draw(st.integers(0, 4)) == 0:
        start = draw(st.integers(0, len(prompt) - 1))
        targets = tuple(prompt[start + 1 :]) + (draw(st.integers(0, VOCAB_SIZE - 1)),)
        return "submit", {"prompt": prompt, "scoring": Scoring(start, targets)}
    if draw(st.integers(0, 4)) == 0:
        return "submit", {"prompt": prompt, "hidden": HiddenSum(draw(st.booleans()))}
    stop_after = draw(st.one_of(st.none(), st.integers(1, 6)))
    return "submit", {
        "prompt": prompt,
        "max_tokens": draw(st.integers(1, 20)),
        "listener": FakeListener(stop_after=stop_after),
        "stop_ids": draw(st.sampled_from([frozenset(), STOP_IDS])),
        "priority": draw(st.integers(-2, 2)),
    }


def random_grammar(seed: int) -> ScriptedGrammar:
    """A few states with one to three moves each, of which the last is final."""
    rng = random.Random(seed)
    num_states = rng.randrange(2, 14)
    moves: list[dict[int, int]] = []
    for state in range(num_states - 1):
        tokens = rng.sample(range(1, VOCAB_SIZE), rng.choice([1, 1, 2, 3]))
        moves.append({token: rng.randrange(num_states) for token in tokens})
        moves[-1][tokens[0]] = state + 1
    return ScriptedGrammar((*moves, {}), frozenset({num_states - 1, rng.randrange(num_states)}))


@st.composite
def constrained(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """Some of the requests are under a grammar, which may still be compiled."""
    kind, fields = draw(submissions())
    if "max_tokens" in fields and draw(st.booleans()):
        grammar = random_grammar(draw(st.integers(0, 10**6)))
        is_late = draw(st.booleans())
        fields["grammar"] = PendingGrammar(None if is_late else grammar)
        fields["late_grammar"] = grammar
        fields["jump_forward"] = draw(st.booleans())
    return kind, fields


def events(
    submissions: st.SearchStrategy[tuple[str, dict[str, object]]],
) -> st.SearchStrategy[list[tuple[str, object]]]:
    return st.lists(
        st.one_of(
            submissions,
            st.tuples(st.just("abort"), st.integers(0, 20)),
            st.tuples(st.just("step"), st.integers(1, 4)),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("policy"), st.sampled_from(POLICY_NAMES)),
        ),
        max_size=24,
    )


def houses(**fields: st.SearchStrategy[object]) -> st.SearchStrategy[EngineHarness]:
    """Small pools of both page sizes; `fields` set further fields of the harness."""
    return st.builds(
        EngineHarness,
        num_pages=st.sampled_from([48, 64, 200]),
        page_size=st.just(1),
        token_budget=st.sampled_from([1, 3, 16, 64]),
        max_running=st.sampled_from([1, 2, 8]),
        policy=st.sampled_from(POLICY_NAMES),
        is_hopeful=st.booleans(),
        **fields,
    ) | st.builds(
        EngineHarness,
        num_pages=st.sampled_from([4, 6, 20]),
        page_size=st.just(16),
        token_budget=st.sampled_from([16, 17, 64]),
        max_running=st.sampled_from([1, 3, 8]),
        policy=st.sampled_from(POLICY_NAMES),
        is_hopeful=st.booleans(),
        **fields,
    )


def failing(houses: st.SearchStrategy[EngineHarness]) -> st.SearchStrategy[EngineHarness]:
    """The same, where some steps fail, and in other steps the rows of some requests."""

    def told(harness: EngineHarness, fail_steps: set[int], row_errors: set[int]) -> EngineHarness:
        harness.executor.fail_steps = fail_steps
        harness.executor.row_errors = row_errors
        return harness

    return st.builds(
        told, houses, st.sets(st.integers(1, 30), max_size=4), st.sets(st.integers(1, 8))
    )


def play(harness: EngineHarness, events: list[tuple[str, object]]) -> None:
    """Apply the events, then run until idle. Late grammars arrive after the next event."""
    due: list[tuple[PendingGrammar, ScriptedGrammar]] = []
    for kind, what in (*events, ("step", 1), ("step", 1)):
        due, late = [], due
        if kind == "submit":
            assert isinstance(what, dict)
            what = dict(what)
            if (bound := what.pop("late_grammar", None)) is not None:
                due.append((what["grammar"], bound))
            try:
                harness.submit(**what)
            except PromptTooLong:
                assert len(what["prompt"]) >= harness.engine.max_model_len
        elif kind == "abort" and harness.requests:
            assert isinstance(what, int)
            request = harness.requests[what % len(harness.requests)]
            harness.engine.abort(request)
            assert request.is_finished
            harness.engine.scheduler.check()
        elif kind == "step":
            assert isinstance(what, int)
            for _ in range(what):
                harness.step()
        elif kind == "policy":
            assert isinstance(what, str)
            harness.engine.scheduler.policy = what
        elif kind == "flush":
            harness.engine.flush_cache()
            harness.engine.scheduler.check()
        for grammar, bound in late:
            grammar.bound = bound
    harness.run()


def assert_all_right(harness: EngineHarness) -> None:
    """All outputs are right, only what was told to fail is an error, and nothing is held."""
    executor = harness.executor
    told_to_fail = executor.row_errors | {
        row.request_id
        for number, plan in enumerate(executor.plans, 1)
        if number in executor.fail_steps
        for row in plan.rows
    }
    for request in harness.requests:
        assert_right(request)
        if request.finish_reason is FinishReason.ERROR:
            assert request.error and request.id in told_to_fail
    harness.assert_nothing_held()
