"""What follows calls, as it is remembered, and when it is offered to be computed."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as some
from program_harness import ProgramHarness, gen, pause, select, text

from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.programs.likely_texts import MAX_FOLLOWING, LikelyTexts, num_common

LONG = " It has 127,000 people, says the page that was read.\n"


def ids_of(text: str) -> array[int]:
    return array("i", list(text.encode()))


@dataclass
class Recorder:
    """Takes offers; `offers` are those that stand, `ended` what became of the others."""

    offers: dict[Hashable, tuple[str, int]] = field(default_factory=dict)
    ended: list[tuple[str, str | None]] = field(default_factory=list)

    def offer(self, owner: Hashable, namespace: str, ids: array[int], num_known: int) -> None:
        self.offers[owner] = bytes(list(ids)).decode(), num_known

    def withdraw(self, owner: Hashable, prompt: array[int] | None) -> None:
        text, _ = self.offers.pop(owner)
        self.ended.append((text, None if prompt is None else bytes(list(prompt)).decode()))

    @property
    def likely(self) -> list[str]:
        """What is expected to follow."""
        return [text[num_known:] for text, num_known in self.offers.values()]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def learning(context: ProgramContext, recorder: Recorder) -> ProgramContext:
    return replace(context, prefills=recorder)


def agent(context: ProgramContext, said: str, follows: str, **session: str) -> ProgramHarness:
    """A program up to its second call; a tool runs in between."""
    harness = begun(context, said, **session)
    harness.on(0, text(follows), gen("b", "agent.py:2", max_tokens=4))
    harness.generate("so")
    return harness


def begun(context: ProgramContext, said: str, **session: str) -> ProgramHarness:
    """The program while the tool runs."""
    harness = ProgramHarness(context, **session)
    harness.on(0, text("Q:"), gen("a", "agent.py:1", max_tokens=64))
    harness.generate(said)
    harness.on(0, pause(label="tool"))
    return harness


def test_what_followed_the_same_output_is_offered_while_the_branch_rests(
    learning: ProgramContext, recorder: Recorder
) -> None:
    agent(learning, "Ulm", LONG)
    assert not recorder.offers and not recorder.ended
    harness = begun(learning, "Ulm")
    assert recorder.likely == [LONG]
    harness.on(0, text(LONG), gen("b", "agent.py:2", max_tokens=4))
    assert recorder.ended == [("Q:Ulm" + LONG, "Q:Ulm" + LONG)] and not recorder.offers


def test_after_another_output_what_the_last_two_agree_in_is_offered(
    learning: ProgramContext, recorder: Recorder
) -> None:
    agent(learning, "Ulm", LONG + "1")
    begun(learning, "Bonn")
    assert not recorder.likely, "one time says nothing of another output"
    agent(learning, "Bonn", LONG + "2")
    begun(learning, "Jena")
    assert recorder.likely == [LONG]


def test_what_turned_out_otherwise_is_expected_less(
    learning: ProgramContext, recorder: Recorder
) -> None:
    agent(learning, "Ulm", LONG + "a")
    agent(learning, "Ulm", LONG + "b")
    begun(learning, "Ulm")
    assert recorder.likely == [LONG]


def test_each_choice_of_a_select_has_a_continuation_of_its_own(
    learning: ProgramContext, recorder: Recorder
) -> None:
    def chosen(best: int) -> ProgramHarness:
        harness = ProgramHarness(learning)
        harness.on(0, text("Q:"), select("yes", "no"))
        for index, request in enumerate(list(harness.queue.open)):  # type: ignore[attr-defined]
            num = len(request.scoring.targets)
            logprob = 0.0 if index == best else -9.0
            harness.queue.score(request, [logprob] * num)  # type: ignore[attr-defined]
        harness.session.advance()
        return harness

    for best, follows in ((0, " Then go on as you were told."), (1, " Then stop, and say why.")):
        harness = chosen(best)
        harness.on(0, text(follows), gen("b", "agent.py:2"))
        harness.generate("so")
    chosen(0)
    chosen(1)
    assert recorder.likely == [" Then go on as you were told.", " Then stop, and say why."]


@pytest.mark.parametrize("session", [{"account": "bob"}, {"namespace": "n"}, {"history": "h"}])
def test_nobody_learns_from_others(
    learning: ProgramContext, recorder: Recorder, session: dict[str, str]
) -> None:
    agent(learning, "Ulm", LONG)
    begun(learning, "Ulm", **session)
    assert not recorder.offers


def test_an_offer_ends_with_its_program(learning: ProgramContext, recorder: Recorder) -> None:
    agent(learning, "Ulm", LONG)
    begun(learning, "Ulm").session.cancel()
    harness = begun(learning, "Ulm")
    harness.send(end=True)
    assert recorder.ended == [("Q:Ulm" + LONG, None)] * 2 and not recorder.offers


def test_short_texts_are_not_worth_a_step(learning: ProgramContext, recorder: Recorder) -> None:
    agent(learning, "Ulm", " is it")
    begun(learning, "Ulm")
    assert not recorder.offers


texts = some.text(alphabet="ab", max_size=6).map(ids_of)


@given(some.lists(some.tuples(some.sampled_from("xy"), texts, texts), max_size=20))
def test_what_is_found_is_the_rule_and_the_memory_is_bounded(
    notes: list[tuple[str, array[int], array[int]]],
) -> None:
    most, memory = 40, LikelyTexts(40)
    of_op: dict[object, list[array[int]]] = {}
    for op, said, ids in notes:
        memory.note(op, said, ids)
        assert memory.num_tokens == sum(len(f.ids) for f in memory._followed.values()) <= most
        for key in (op, (op, bytes(said))):
            of_op.setdefault(key, []).append(ids)
    for op, said, _ in notes:
        own, all_of = of_op[op, bytes(said)], of_op[op]
        expected = own[-1][: num_common(own[-2], own[-1])] if len(own) > 1 else own[-1]
        found = memory.find(op, said)
        agreed = all_of[-1][: num_common(all_of[-2], all_of[-1])] if len(all_of) > 1 else ids_of("")
        assert found in (expected, agreed, ids_of(""), own[-1]), "what was long ago is forgotten"
        if sum(len(ids) for _, _, ids in notes) * 2 <= most:
            assert found == expected


def test_one_text_is_remembered_up_to_a_bound() -> None:
    memory = LikelyTexts()
    memory.note("op", ids_of("x"), array("i", [1]) * (MAX_FOLLOWING + 9))
    assert len(memory.find("op", ids_of("x"))) == MAX_FOLLOWING
