"""The three ways to choose among texts, on scores made by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemma.frontend.protocol.choices import ChoiceScore, decide
from stemma.frontend.protocol.ir import CHOICES_METHODS

LENGTH, GREEDY, UNCONDITIONAL = CHOICES_METHODS


def scores(*logprobs: tuple[float, ...]) -> list[ChoiceScore]:
    return [ChoiceScore(tuple(range(len(row))), row, row) for row in logprobs]


def test_token_length_normalized_takes_the_best_mean_not_the_best_sum() -> None:
    assert decide(LENGTH, scores((-1.0,), (-0.6, -0.6, -0.6))) == 1


def test_greedy_takes_the_best_token_at_each_place() -> None:
    assert decide(GREEDY, scores((-0.5, -9.0), (-0.6, -0.1))) == 0
    assert decide(GREEDY, scores((-0.5, -9.0), (-0.5, -0.1))) == 1


def test_greedy_continues_an_ended_choice_with_its_own_mean() -> None:
    assert decide(GREEDY, scores((-0.5,), (-0.5, -0.4))) == 1
    assert decide(GREEDY, scores((-0.5,), (-0.5, -0.6))) == 0


def test_unconditional_prefers_what_the_context_made_likelier() -> None:
    rare = ChoiceScore((1,), (-3.0,), (-9.0,))
    usual = ChoiceScore((2,), (-1.0,), (-1.0,))
    assert decide(UNCONDITIONAL, [usual, rare]) == 1
    assert decide(LENGTH, [usual, rare]) == 0


ROWS = st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=5).map(tuple), min_size=1)


@pytest.mark.parametrize("method", CHOICES_METHODS)
@given(rows=ROWS)
def test_equal_choices_give_the_first_and_any_scores_give_a_choice(
    method: str, rows: list[tuple[float, ...]]
) -> None:
    assert 0 <= decide(method, scores(*rows)) < len(rows)
    assert decide(method, scores(rows[0], rows[0], rows[0])) == 0
