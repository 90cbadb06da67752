"""Who lacks a grammar, and what becomes of a request when it comes, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import ScriptedGrammar, make_request

from stemma.constrained.serving.grammar_state import GrammarFailure, PendingGrammar
from stemma.runtime.schedule.grammar_uptake import GrammarUptake, begin_output
from stemma.runtime.schedule.request import FinishReason, Request


def lacking(uptake: GrammarUptake, count: int) -> list[Request]:
    requests = [make_request(i, [1, 2], grammar=PendingGrammar()) for i in range(count)]
    for request in requests:
        uptake.add(request)
    return requests


def bind(request: Request, grammar: Any = None) -> None:
    assert request.grammar is not None
    request.grammar.bound = grammar or ScriptedGrammar.of((1, 2), (2, 1))


def test_a_request_is_held_until_its_grammar_comes_or_never_will() -> None:
    uptake = GrammarUptake()
    uptake.add(make_request(9, [1]))
    first, second, third = lacking(uptake, 3)
    assert len(uptake) == 3 and not uptake.has_arrived and not list(uptake.take())
    bind(third)
    assert first.grammar is not None
    first.grammar.failure = GrammarFailure("no")
    assert uptake.has_arrived
    assert list(uptake.take()) == [first, third]
    assert len(uptake) == 1 and not uptake.has_arrived
    uptake.forget(second)
    uptake.forget(second)
    assert not uptake


def test_one_that_is_forgotten_while_others_are_taken_is_not_taken() -> None:
    uptake = GrammarUptake()
    first, second, third = lacking(uptake, 3)
    for request in (first, second, third):
        bind(request)
    taken = []
    for request in uptake.take():
        taken.append(request)
        uptake.forget(second)
    assert taken == [first, third]


def test_an_output_follows_its_grammar_from_the_start() -> None:
    (request,) = lacking(GrammarUptake(), 1)
    assert request.num_ready == 1  # the last token waits
    bind(request)
    assert begin_output(request) is None
    assert request.follower is not None and request.num_ready == 2


def test_an_output_that_must_be_empty_has_ended() -> None:
    (request,) = lacking(GrammarUptake(), 1)
    bind(request, ScriptedGrammar(({},), frozenset({0})))
    assert begin_output(request) is FinishReason.STOP


def test_a_grammar_that_never_comes_is_the_requests_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class NoMatcher:
        def matcher(self) -> None:
            raise RuntimeError("out of memory")

    first, second = lacking(GrammarUptake(), 2)
    assert first.grammar is not None
    first.grammar.failure = GrammarFailure("too large", "GrammarTooLarge")
    assert begin_output(first) is FinishReason.ERROR
    assert (first.error, first.error_kind) == ("too large", "GrammarTooLarge")
    bind(second, NoMatcher())
    assert begin_output(second) is FinishReason.ERROR
    assert second.error is not None and "RuntimeError: out of memory" in second.error
    assert "a matcher could not be made" in caplog.text
