"""What a draft model's guesses are worth, and how many are asked for."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

import pytest

from stemma.runtime.speculate.drafter import Draft
from stemma.runtime.speculate.guesses import Candidate, ModelDrafter, ModelText, Worth

CURVE = [1.0 + 0.1 * max(0, tokens - 8) for tokens in range(513)]  # flat up to 8 tokens


def known(num_tokens: int) -> bool:
    return True


class Subject:
    prompt = prediction = array("i")
    history = program_key = None
    op_key = "op"


def opened(drafter: ModelDrafter) -> ModelText:
    return drafter.open(Subject())


def test_a_guess_is_proposed_from_where_the_text_stands() -> None:
    text = opened(ModelDrafter())
    assert text.propose(8).tokens == () and not text.has_guess
    text.offer([5, 6, 7, 8], [-0.1] * 4)
    assert text.propose(2).tokens == (5, 6)
    assert text.propose(8, (5,)).tokens == (6, 7, 8)
    assert text.propose(8, (9,)).tokens == ()
    text.extend([5, 6])
    assert text.propose(8).tokens == (7, 8)
    text.extend([1])
    assert text.propose(8).tokens == () and not text.has_guess
    text.offer([1, 2, 3], [-0.1, math.nan, -0.1])
    assert text.propose(8).tokens == (1,)


def test_confidence_is_how_often_such_guesses_were_right() -> None:
    text = opened(ModelDrafter())
    for _ in range(200):
        text.offer([1, 2], [math.log(0.9), math.log(0.2)])
        text.note(text.propose(2), 1)
    first, second = text.propose(2).confidences
    assert first == pytest.approx(1.0, abs=0.02) and second == pytest.approx(0.0, abs=0.02)


def test_more_is_guessed_the_more_is_right_and_the_less_a_pass_costs() -> None:
    def num_ahead(num_right: int, pass_s: float, num_rows: int = 1) -> int:
        drafter = ModelDrafter(has_kv=False)
        texts = [opened(drafter) for _ in range(num_rows)]
        drafter.note_passes(4 * pass_s, 4)
        for text in texts:
            for _ in range(50):
                text.offer([1, 2, 3, 4], [-0.1] * 4)
                text.note(text.propose(4), num_right)
        return drafter.num_ahead(texts, CURVE, 8, known)[0]

    assert num_ahead(4, 0.01) > num_ahead(2, 0.01) > num_ahead(0, 0.01) == 0
    assert num_ahead(4, 0.01) > num_ahead(4, 0.3) >= num_ahead(4, 2.0) == 0
    assert num_ahead(4, 0.01, num_rows=2) > num_ahead(4, 0.01, num_rows=128) == 0


def test_where_nothing_pays_some_are_tried_again_ever_less_often_until_it_does() -> None:
    drafter = ModelDrafter(has_kv=False)
    text = opened(drafter)
    assert drafter.num_ahead([text], [], 8, known) == [3], "nothing is measured yet"
    drafter.note_passes(40.0, 4)
    asked = [drafter.num_ahead([text], CURVE, 8, known)[0] for _ in range(4000)]
    tries = [place for place, num in enumerate(asked) if num]
    gaps = [b - a for a, b in pairwise(tries)]
    assert tries[0] < 50 and gaps == sorted(gaps) and gaps[1] == 2 * gaps[0]
    assert 500 < gaps[-1] < 1000, "they do not end"
    for _ in range(60):
        drafter.note_passes(0.04, 4)
    assert drafter.num_ahead([text], CURVE, 8, known)[0] > 0, "passes have become cheap"
    for _ in range(60):
        drafter.note_passes(40.0, 4)
    again = [drafter.num_ahead([text], CURVE, 8, known)[0] for _ in range(200)]
    assert sum(map(bool, again)) == 2


def taught(drafter: ModelDrafter, op: str, num_right: int) -> None:
    """Of four guesses of an op so many are right."""
    text = drafter.open(SubjectOf(op))
    for _ in range(50):
        text.offer([1, 2, 3, 4], [-0.1] * 4)
        text.note(text.propose(4), num_right)


class SubjectOf(Subject):
    def __init__(self, op: str) -> None:
        self.op_key = op  # type: ignore[assignment]


def test_requests_are_followed_whose_ops_guesses_would_pay_alone() -> None:
    drafter = ModelDrafter()
    assert drafter.follows("bad", True, []), "nothing is measured yet"
    for _ in range(300):
        drafter.note_step(0.01, 0.01)
    assert not drafter.follows("bad", True, []), "nobody wants guesses"
    drafter = ModelDrafter()
    drafter.note_passes(0.9, 3)
    taught(drafter, "good", 4)
    taught(drafter, "bad", 0)
    assert drafter.follows("good", True, CURVE)
    assert drafter.num_ahead([drafter.open(SubjectOf("good"))], CURVE, 8, known)[0] > 0
    drafter.note_step(1.0, 0.1)
    assert drafter.follows("bad", True, CURVE), "nothing went into trials"
    assert drafter.num_ahead([drafter.open(SubjectOf("bad"))], CURVE, 8, known) == [2]
    drafter.note_step(1.0, 0.1)
    assert not drafter.follows("bad", True, CURVE)
    assert drafter.follows("good", True, CURVE)
    assert drafter.follows(None, False, CURVE), "its text may be the beginning of others"
    for _ in range(300):
        drafter.note_step(0.01, 0.01)
    assert not drafter.follows(None, False, CURVE), "none has paid for long"
    drafter.note_step(1000.0, 0.0)
    assert drafter.follows("bad", True, CURVE), "so little of all time may be lost"
    assert drafter.follows(None, False, CURVE)
    other = ModelDrafter(has_kv=False)
    other.note_passes(0.9, 3)
    other.note_step(0.1, 0.1)
    assert other.follows("bad", True, CURVE), "it has nothing to follow with"


def test_a_text_that_is_followed_in_vain_is_tried_for_a_few_tokens() -> None:
    drafter = ModelDrafter()
    taught(drafter, "bad", 0)
    drafter.note_passes(0.9, 3)
    text = drafter.open(SubjectOf("bad"))
    asked = []
    while text.is_worth_following(CURVE):
        asked += drafter.num_ahead([text], CURVE, 8, known)
    assert asked == [2] * 4
    taught(drafter, "good", 4)
    other = drafter.open(SubjectOf("good"))
    assert all(drafter.num_ahead([other], CURVE, 8, known)[0] > 0 for _ in range(20))
    assert other.is_worth_following(CURVE)


@pytest.mark.parametrize("is_right", [True, False])
def test_guesses_that_nobody_verifies_are_learnt_from(is_right: bool) -> None:
    drafter = ModelDrafter()
    text, before = opened(drafter), opened(drafter).rate
    for _ in range(100):
        text.offer([1, 2], [-0.1] * 2)
        text.extend([1] if is_right else [3])
        text.extend([2])
    assert text.rate > before if is_right else text.rate < before / 4
    first, *_ = text_of_two(drafter).propose(2).confidences
    assert first > 0.95 if is_right else first < 0.1
    assert drafter.open(SubjectOf("op")).rate == pytest.approx(text.rate, abs=0.1)


def text_of_two(drafter: ModelDrafter) -> ModelText:
    text = opened(drafter)
    text.offer([1, 2], [-0.1] * 2)
    return text


def test_what_is_forced_or_was_verified_is_not_learnt_from_again() -> None:
    drafter = ModelDrafter()
    text = text_of_two(drafter)
    before = text.rate
    text.skip([3])
    assert text.rate == before
    text.offer([1, 2], [-0.1] * 2)
    text.note(text.propose(2), 0)
    noted = text.rate
    text.extend([3])
    assert text.rate == noted < before


def test_an_op_that_is_new_begins_with_what_is_known_of_all() -> None:
    drafter = ModelDrafter()
    before = drafter.open(SubjectOf("new")).rate
    taught(drafter, "good", 4)
    assert drafter.open(SubjectOf("newer")).rate > before
    for _ in range(4):
        taught(drafter, "bad", 0)
    assert drafter.open(SubjectOf("newest")).rate < before


def test_others_guesses_that_are_preferred_make_it_guess_less() -> None:
    drafter = ModelDrafter()
    text = opened(drafter)
    drafter.note_passes(0.4, 4)
    before = drafter.num_ahead([text], CURVE, 8, known)[0]
    for _ in range(30):
        text.offer([1], [-0.1])
        text.note_choice(False, Worth(0.1, 1))
    assert drafter.num_ahead([text], CURVE, 8, known)[0] < before


@pytest.mark.parametrize(("num_right", "pays"), [(0.0, True), (4.0, False)])
def test_guesses_are_to_bring_more_than_what_others_guess_without_a_pass(
    num_right: float, pays: bool
) -> None:
    """Its own are preferred all the same: they are longer."""
    drafter = ModelDrafter(has_kv=False)
    text = opened(drafter)
    drafter.note_passes(0.8, 4)
    for _ in range(200):
        text.offer([1, 2], [-0.1] * 2)
        text.note_choice(True, Worth(num_right, 5))
        text.extend([1, 2])
    assert any(drafter.num_ahead([text], CURVE, 8, known)) is pays
    assert text.pays(CURVE) is pays


def test_where_guesses_do_not_pay_it_is_asked_in_some_steps_until_there_is_a_new_text() -> None:
    drafter = ModelDrafter(has_kv=False)
    text = opened(drafter)
    drafter.note_passes(400.0, 4)
    assert not drafter.rests()
    assert not any(drafter.num_ahead([text], CURVE, 8, known))
    assert drafter.rests()
    opened(drafter)
    assert not drafter.rests()
    num_asked = 0
    for _ in range(1000):
        if not drafter.rests():
            num_asked += 1
            drafter.num_ahead([text], CURVE, 8, known)
    assert num_asked < 150


@pytest.mark.parametrize(("num_right", "num_tried"), [(3, 2), (0, 0)])
def test_a_size_that_was_not_measured_is_tried_where_much_is_expected_of_it(
    num_right: int, num_tried: int
) -> None:
    """A step of 3 tokens, drawn between those of 2 and 4, looks dearer than it may be."""
    curve = [1.0, 1.0, 1.05, 1.4, 1.75, *[2.5] * 508]
    drafter = ModelDrafter(has_kv=False)
    text = opened(drafter)
    drafter.note_passes(0.8, 4)
    for number in range(80):
        text.offer([1], [-0.1])
        text.note(text.propose(1), int(number % 4 < num_right))
    assert drafter.num_ahead([text], curve, 8, known) == [min(num_right, 1)]
    assert drafter.num_ahead([text], curve, 8, lambda size: size != 3) == [num_tried]
    assert drafter.num_ahead([text], curve, 8, lambda size: size != 4) == [min(num_right, 1)]


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """What is guessed up to each token."""
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for number, token_id in enumerate(draft.tokens):
        paths[number] = (*paths[number - 1], token_id)
    for number, side in enumerate(draft.sides, len(draft.tokens)):
        paths[number] = (*paths[side.behind], side.token_id)
    return list(paths.values())[1:]


def test_candidates_stand_beside_a_guess_and_what_the_text_goes_on_with_remains() -> None:
    text = opened(ModelDrafter())
    beside = [Candidate(-1, 7, -1.0), Candidate(0, 8, -1.0), Candidate(2, 9, -1.0)]
    text.offer([5, 6], [-0.1] * 2, [*beside, Candidate(1, 4, -math.inf)])
    assert paths(text.propose(8)) == [(5,), (5, 6), (7,), (5, 8), (7, 9)]
    assert paths(text.propose(1)) == [(5,), (7,)]
    assert paths(text.propose(8, (5,))) == [(6,), (8,)]
    text.extend([7])
    assert paths(text.propose(8)) == [(9,)]


def test_of_independent_places_the_likeliest_paths_are_sides() -> None:
    """As of Medusa's heads: behind any candidate of a place come those of the next one."""
    text = opened(ModelDrafter(most=2))
    text.offer([5, 6], [-0.1] * 2, [Candidate(-1, 7, -0.7), Candidate(0, 8, -2.5)])
    draft = text.propose(8)
    assert sorted(paths(draft)) == [(5,), (5, 6), (5, 8), (7,), (7, 6), (7, 8)]
    assert paths(draft)[2:] == [(7,), (7, 6), (5, 8), (7, 8)], "the likeliest come first"
    text.extend([7])
    assert paths(text.propose(8)) == [(6,), (8,)]


def test_candidates_are_asked_for_rarely_where_none_is_worth_verifying() -> None:
    drafter = ModelDrafter(num_candidates=2)
    assert drafter.num_beside() > 0
    for _ in range(100):
        drafter.note_beside(are_verified=False)
    assert sum(drafter.num_beside() > 0 for _ in range(160)) == 10
    for _ in range(3):
        drafter.note_beside(are_verified=True)
    assert all(drafter.num_beside() > 0 for _ in range(160))
