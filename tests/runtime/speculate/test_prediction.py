"""Drafts from a text that the caller expects."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from stemma.runtime.speculate.drafter import NO_DRAFT, Draft
from stemma.runtime.speculate.prediction import REACH, PredictedText, PredictionDrafter


def opened(prediction: Sequence[int]) -> PredictedText:
    subject = SimpleNamespace(prediction=array("i", prediction))
    text = PredictionDrafter().open(subject)  # type: ignore[arg-type]
    assert text is not None
    return text


def num_steps(prediction: Sequence[int], output: Sequence[int], room: int = 8) -> int:
    """Steps to the end of an output: each draws a token beyond those of its draft that fit."""
    text, done, steps = opened(prediction), 0, 0
    while done < len(output):
        draft = text.propose(room)
        pairs = zip(draft.tokens, output[done:])
        num_right = next((i for i, (a, b) in enumerate(pairs) if a != b), len(draft.tokens))
        text.note(draft, num_right)
        text.extend(output[done : done + num_right + 1])
        done += num_right + 1
        steps += 1
    return steps


def test_without_a_prediction_nothing_is_followed() -> None:
    subject = SimpleNamespace(prediction=array("i"))
    assert PredictionDrafter().open(subject) is None  # type: ignore[arg-type]


def test_it_begins_with_the_first_token() -> None:
    assert opened([5, 6, 7]).propose(2).tokens == (5, 6)


@pytest.mark.parametrize("room", [1, 3, 8])
def test_an_output_as_predicted_takes_one_step_for_each_full_draft(room: int) -> None:
    text = list(range(100, 190))
    assert num_steps(text, text, room) == -(-90 // (room + 1))


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: [*text[:40], 7, *text[41:]],  # a token is another one
        lambda text: [*text[:40], 7, 8, 9, *text[40:]],  # some are put in
        lambda text: [*text[:40], *text[60:]],  # some are left out
        lambda text: text[30:],  # the beginning is
    ],
)
def test_an_edit_costs_a_few_steps(edit: object) -> None:
    text = [random.Random(3).randrange(1000) + i for i in range(90)]
    output = edit(text)  # type: ignore[operator]
    assert num_steps(text, output) <= len(output) / 9 + 7


def test_a_tail_moves_the_place_for_one_proposal_only() -> None:
    text = opened([1, 2, 3, 4, 5])
    assert text.propose(2, tail=[1, 2]).tokens == (3, 4)
    assert text.propose(2, tail=[9]) == NO_DRAFT
    assert text.propose(2).tokens == (1, 2)


@pytest.mark.parametrize(("gap", "is_found"), [(REACH - 1, True), (REACH, False)])
def test_a_place_is_looked_for_within_reach_of_the_last_one(gap: int, is_found: bool) -> None:
    text = opened([1, 2, *[3] * gap, 8, 9, 10])
    text.extend([1, 2, 8, 9])
    assert text.propose(4) == (Draft((10,), (0.9,), "prediction") if is_found else NO_DRAFT)


def test_behind_its_end_nothing_follows() -> None:
    text = opened([1, 2])
    text.extend([1, 2])
    assert text.propose(4).tokens == ()
    text.extend([8, 9])
    assert text.propose(4) == NO_DRAFT


def test_confidence_falls_with_what_is_wrong_and_comes_back() -> None:
    text = opened([1] * 500)

    def confidence() -> float:
        return text.propose(1).confidences[0]

    first = confidence()
    for _ in range(20):
        text.note(Draft((1, 1, 1), (0.9,) * 3), 0)
    low = confidence()
    for _ in range(20):
        text.note(Draft((1, 1, 1), (0.9,) * 3), 3)
    assert low < 0.3 < first and confidence() > 0.8
