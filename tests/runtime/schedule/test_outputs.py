"""What rows have given is taken into requests, without an engine."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from fakes import FakeListener, ScriptedGrammar, make_request

from stemma.constrained.serving.grammar_state import PendingGrammar
from stemma.runtime.schedule.grammar_uptake import begin_output
from stemma.runtime.schedule.outputs import Outputs
from stemma.runtime.schedule.plan import Row, RowResult
from stemma.runtime.schedule.queue.admission import NewTokenEstimate
from stemma.runtime.schedule.queue.policy import OutputShare
from stemma.runtime.schedule.request import (
    FinishReason,
    HiddenSum,
    Request,
    RequestState,
    Scoring,
)
from stemma.runtime.schedule.sampling_params import SamplingParams
from stemma.runtime.schedule.stats import SchedulerStats

ROW = Row(request_id=1, table_row=0, start=2, input_ids=(3,))


class Taken:
    """Outputs, with what they count."""

    def __init__(self) -> None:
        self.stats, self.new_tokens = SchedulerStats(), NewTokenEstimate(OutputShare())
        self.outputs = Outputs(self.stats, self.new_tokens)

    def running(self, *, max_tokens: int = 4, **fields: Any) -> Request:
        request = make_request(1, [1, 2, 3], **fields)
        request.max_output_tokens = max_tokens
        request.state = RequestState.RUNNING
        self.new_tokens.num_running += request.num_new_tokens
        if request.grammar is not None:
            assert begin_output(request) is None
        return request

    def sample(self, request: Request, *token_ids: int) -> list[FinishReason | None]:
        return [self.outputs.take(request, ROW, RowResult(token_id=i)) for i in token_ids]


def under(*texts: tuple[int, ...]) -> PendingGrammar:
    return PendingGrammar(bound=ScriptedGrammar.of(*texts))


def test_tokens_are_appended_until_the_last_that_may_come() -> None:
    taken = Taken()
    request = taken.running(max_tokens=3)
    assert taken.sample(request, 5, 6, 7) == [None, None, FinishReason.LENGTH]
    assert list(request.output_ids) == [5, 6, 7]
    assert taken.stats.num_generated_tokens == 3
    taken.new_tokens.check([request])


def test_a_stop_token_ends_the_request_and_is_not_appended() -> None:
    taken = Taken()
    request = taken.running(stop_ids=frozenset({5}))
    assert taken.sample(request, 6, 5) == [None, FinishReason.STOP]
    assert list(request.output_ids) == [6] and taken.stats.num_generated_tokens == 2


def test_the_listener_may_end_the_request() -> None:
    taken = Taken()
    request = taken.running(listener=FakeListener(stop_after=2))
    assert taken.sample(request, 5, 6) == [None, FinishReason.STOP]


def test_what_a_grammar_forces_is_appended_behind_what_was_sampled() -> None:
    taken = Taken()
    request = taken.running(max_tokens=9, grammar=under((1, 2, 3, 1), (1, 2, 3, 4, 5), (2,)))
    assert taken.sample(request, 1) == [None]
    assert list(request.output_ids) == [1, 2, 3]
    assert request.num_forced_tokens == taken.stats.num_jumped_tokens == 2
    taken.new_tokens.check([request])
    assert taken.sample(request, 4) == [FinishReason.STOP]
    assert list(request.output_ids) == [1, 2, 3, 4, 5]


def test_a_forced_run_is_cut_where_the_output_is_full() -> None:
    taken = Taken()
    request = taken.running(
        max_tokens=2,
        grammar=under(
            (1, 2, 3, 4),
        ),
    )
    assert taken.outputs.append_forced(request) is FinishReason.LENGTH
    assert list(request.output_ids) == [1, 2]


def test_a_token_that_the_grammar_does_not_have_is_an_error_and_not_appended() -> None:
    taken = Taken()
    request = taken.running(grammar=under((1,), (2,)))
    assert taken.sample(request, 3) == [FinishReason.ERROR]
    assert request.error == "token 3 does not follow from the grammar"
    assert not request.output_ids


def test_scores_and_pooled_states_end_with_the_last_computed_token() -> None:
    taken = Taken()
    scored = taken.running(scoring=Scoring(0, (2, 3, 4)))
    scored.num_computed_tokens = 2
    assert taken.outputs.take(scored, ROW, RowResult(target_logprobs=(-1.0, -2.0))) is None
    scored.num_computed_tokens = 3
    assert taken.outputs.take(scored, ROW, RowResult(target_logprobs=(-3.0,))) is FinishReason.STOP
    assert scored.scores == [-1.0, -2.0, -3.0]
    pooled = taken.running(hidden=HiddenSum(is_mean=True))
    pooled.num_computed_tokens = 3
    row = RowResult(pooled=np.array([6.0]))
    assert taken.outputs.take(pooled, ROW, row) is FinishReason.STOP
    assert pooled.hidden is not None and pooled.hidden.pooled().tolist() == [2.0]


def test_what_an_output_is_known_to_begin_with_is_taken_at_once() -> None:
    """With a grammar and without one, before anything is drawn; a token each where the output's
    log probabilities are wanted, as they come with draws."""
    for grammar in (None, under((5, 6, 7), (5, 6, 8))):
        taken = Taken()
        request = taken.running(grammar=grammar)
        request.begun = array("i", (5, 6))
        assert taken.outputs.resume(request) is None
        assert listener_tokens(request) == [5, 6]
    taken = Taken()
    request = taken.running()
    request.sampling = SamplingParams(logprobs=0)
    request.begun = array("i", (5, 6))
    assert taken.outputs.resume(request) is None and not listener_tokens(request)
    taken.sample(request, 9, 9, 9)
    assert listener_tokens(request) == [5, 6, 9]


def test_what_an_output_begins_with_may_end_it() -> None:
    for begun, grammar, reason in [
        ((5, 6, 7, 8, 9), None, FinishReason.LENGTH),
        ((5, 6), under((5, 6)), FinishReason.STOP),
        ((5, 9), under((5, 6)), FinishReason.ERROR),
    ]:
        taken = Taken()
        request = taken.running(grammar=grammar)
        request.begun = array("i", begun)
        assert taken.outputs.resume(request) is reason


def listener_tokens(request: Request) -> list[int]:
    listener = request.listener
    assert isinstance(listener, FakeListener)
    return listener.tokens
