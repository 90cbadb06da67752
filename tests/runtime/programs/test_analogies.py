"""What is said by analogy: other words in the same slots, nothing where a slot cannot be filled."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.runtime.programs import analogies
from stemma.runtime.programs.analogies import MAX_OF_OP, MAX_PROPOSALS, Analogies, Analogy

BEFORE = "Answer with an action.\n<user>"
# Prompt, what is said first, what is said then: {0} and {1} are slots.
TASKS = (
    ("What is {0} times {1}?", "I need to multiply {0} by {1}.", "\nAction: calculator[{0}*{1}]"),
    ("How often does {0} fit into {1}?", "I need to divide {1} by {0}.", "\nAction: [{1}/{0}]"),
    ("Is Mount {0} higher than {1}?", "I look up Mount {0}.", "\nAction: lookup[height of {0}]"),
)
NUMBERS = st.lists(st.integers(2, 10_000).map(str), min_size=8, max_size=8, unique=True)
NAMES = st.lists(
    st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=9).map(str.capitalize),
    min_size=8,
    max_size=8,
    unique=True,
)


def opened(known: Analogies, question: str, op: str = "op") -> Analogy:
    return known.open(op, f"{BEFORE}{question}\n<assistant>")


def note(known: Analogies, question: str, output: str, op: str = "op") -> Analogy:
    analogy = opened(known, question, op)
    analogy.end(output)
    return analogy


def proposed(analogy: Analogy, output: str = "") -> str | None:
    proposal = analogy.propose(output)
    return None if proposal is None else proposal.own.text


@pytest.mark.parametrize("task", TASKS)
@settings(max_examples=25)
@given(numbers=NUMBERS, names=NAMES)
def test_an_example_is_said_with_other_words_in_its_slots(
    task: tuple[str, str, str], numbers: list[str], names: list[str]
) -> None:
    question, first, then = task
    words = names if "Mount" in question else numbers
    known = Analogies()
    for i in (0, 2, 4):
        slots = words[i : i + 2]
        note(known, question.format(*slots), (first + then).format(*slots))
    slots = words[6:8]
    output = (first + then).format(*slots)
    analogy = opened(known, question.format(*slots))
    for end in (0, len(first.format(*slots)) // 2, len(first.format(*slots))):
        assert proposed(analogy, output[:end]) == output, "also within a word"
    assert proposed(analogy, output) == output


def test_output_that_is_there_tells_which_example_it_follows() -> None:
    known = Analogies()
    for a, b in (("3", "4"), ("15", "61"), ("7", "9")):
        note(known, f"I have {a} and {b}.", f"I add {a} and {b}.\nAction: [{a}+{b}]")
        note(known, f"I had {a} less {b}.", f"I subtract {b} from {a}.\nAction: [{a}-{b}]")
    analogy = opened(known, "Somebody took 30 of the 50?")
    assert proposed(analogy, "I subtract 30 from 50") == "I subtract 30 from 50.\nAction: [50-30]"
    assert proposed(analogy, "I add 30") == "I add 30 and 50.\nAction: [30+50]"


@pytest.mark.parametrize(
    ("question", "output", "new"),
    [
        ("Add 3, 4 and 5.", "[3+4+5]", "Add 7 and 8."),  # one number less
        ("Where is Ulm?", "lookup[Ulm]", "What else?"),  # no name
    ],
)
def test_nothing_is_said_where_a_slot_cannot_be_filled(
    question: str, output: str, new: str
) -> None:
    known = Analogies()
    note(known, question, output)
    assert proposed(opened(known, new)) is None


def test_the_next_output_is_said_where_it_needs_nothing_that_came_between() -> None:
    known = Analogies()

    def carry_out(one: str, other: str, found: str, *, again: str) -> None:
        question = f"Is {one} higher than {other}?"
        first = note(known, question, f"lookup[height of {one}]")
        between = f"\nObservation: {found}\n"
        prompt = f"{BEFORE}{question}\n<assistant>lookup[height of {one}]{between}"
        known.open("op", prompt, first, between).end(again)

    for one, other, found in (("Ak", "Bor", "731"), ("Cil", "Dro", "52"), ("Eb", "Fal", "9641")):
        carry_out(one, other, found, again=f"lookup[height of {other}]")
    proposal = opened(known, "Is Gom higher than Hul?").propose("")
    assert proposal is not None and proposal.own.text == "lookup[height of Gom]"
    assert proposal.next is not None and proposal.next.text == "lookup[height of Hul]"

    known = Analogies()
    for one, other, found in (("Ak", "Bor", "731"), ("Cil", "Dro", "52"), ("Eb", "Fal", "9641")):
        carry_out(one, other, found, again=f"The height is {found}.")
    proposal = opened(known, "Is Gom higher than Hul?").propose("")
    assert proposal is not None and proposal.own.text == "lookup[height of Gom]"
    assert proposal.next is None, "the height was observed"


def test_examples_of_another_op_or_owner_say_nothing() -> None:
    known = Analogies()
    note(known, "Where is Ulm?", "lookup[Ulm]", op="one")
    assert proposed(opened(known, "Where is Bonn?", op="other")) is None
    assert proposed(opened(Analogies(), "Where is Bonn?", op="one")) is None
    assert proposed(opened(known, "Where is Bonn?", op="one")) == "lookup[Bonn]"


def test_what_was_cut_short_is_no_example() -> None:
    known = Analogies()
    opened(known, "Where is Ulm?").end(None)
    assert known.num_examples == 0 and proposed(opened(known, "Where is Bonn?")) is None


def test_a_chance_is_learnt_from_guesses_that_nobody_was_told() -> None:
    known = Analogies()
    note(known, "Where is Ulm?", "lookup[Ulm]")

    def chance_after(city: str, output: str) -> float:
        analogy = opened(known, f"Where is {city}?")
        proposal = analogy.propose("")
        assert proposal is not None
        analogy.end(output)
        return proposal.own.chance

    cities = [f"{a}{b}il" for a in "BCDFGHKLMN" for b in "aeiou"]
    at_first = chance_after("Bonn", "lookup[Bonn]")
    for number, city in enumerate(cities[:25]):
        after_wrong = chance_after(city, "x" * (number + 1))  # never the same, so no vote for it
    assert after_wrong < at_first
    for city in cities[25:]:
        after_right = chance_after(city, f"lookup[{city}]")
    assert after_right > max(at_first, after_wrong)


def test_no_more_is_remembered_or_asked_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Analogies()
    for number in range(MAX_OF_OP + 20):
        note(known, f"Say {number}.", f"said {number}")
    assert known.num_examples == MAX_OF_OP
    analogy = opened(known, "Say 4711.")
    assert [proposed(analogy) for _ in range(MAX_PROPOSALS)] == ["said 4711"] * MAX_PROPOSALS
    assert proposed(analogy) is None
    note(known, "Say 17.", "word " * 400)
    assert known.num_examples == MAX_OF_OP, "too long to be said"

    monkeypatch.setattr(analogies, "MAX_EXAMPLES", MAX_OF_OP + 5)
    for number in range(6):
        note(known, f"Say {number}.", f"said {number}", op="second")
    opened(known, "Say 4711.", op="second")
    assert known.num_examples == 6, "the op that was used least recently is forgotten"
    del analogy, known  # frees what is native in any order


def test_the_same_example_is_kept_once() -> None:
    known = Analogies()
    for _ in range(3):
        note(known, "Where is Ulm?", "lookup[Ulm]")
    assert known.num_examples == 1
