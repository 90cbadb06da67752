"""What a gen probably will say, as its client is told."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from program_harness import ProgramHarness, gen, text

from stemma.frontend.protocol import wire
from stemma.runtime.programs.context import ProgramContext
from stemma.runtime.programs.foretelling import MAX_TOLD, MIN_CHANCE, Foreteller

ACTION = "Action: lookup[Ulm]"


@pytest.fixture
def foretelling(context: ProgramContext) -> ProgramContext:
    return replace(context, foreteller=Foreteller())


def told(
    context: ProgramContext, output: str, prompt: str = "Where is it?\n", **options: Any
) -> list[tuple[str, float]]:
    """What a program's gen is told of an output, while that comes."""
    harness = ProgramHarness(context, **options.pop("session", {}))
    params = {"foretell": True, "stop": ("\n",), **options}
    harness.on(0, text(prompt), gen("x", "agent.py:1", **params))
    harness.generate(output)
    events = harness.events.of(wire.LIKELY)
    assert all((branch, seq) == (0, 1) for branch, seq, _ in events)
    return [(payload["text"], payload["chance"]) for _, _, payload in events]


def test_an_output_is_told_before_it_is_there_once_it_has_come_often_enough(
    foretelling: ProgramContext,
) -> None:
    assert told(foretelling, ACTION + "\n") == [], "nothing is known yet"
    for _ in range(12):
        found = told(foretelling, ACTION + "\n")
    assert [text for text, _ in found] == [ACTION], "whole, and without the stop string"
    assert all(MIN_CHANCE <= chance <= 1 for _, chance in found)
    assert foretelling.foreteller is not None
    counts = foretelling.foreteller.describe()
    assert counts["num_gens"] == 13 and counts["num_right"] == counts["num_told"] > 0


def test_a_wrong_guess_is_counted_and_so_often_at_most(foretelling: ProgramContext) -> None:
    assert foretelling.foreteller is not None
    for _ in range(12):
        told(foretelling, ACTION + "\n")
    found = told(foretelling, "Action: lookup[Bonn]\n")
    assert found[0][0] == ACTION and len(found) <= MAX_TOLD
    counts = foretelling.foreteller.describe()
    assert counts["num_wrong"] + counts["num_right"] <= counts["num_told"]


@pytest.mark.parametrize(
    "other",
    [
        {"session": {"account": "bob"}},
        {"session": {"namespace": "n"}},
        {"session": {"history": "h"}},
    ],
)
def test_nothing_is_told_of_what_others_have_had(
    foretelling: ProgramContext, other: dict[str, Any]
) -> None:
    for _ in range(12):
        told(foretelling, ACTION + "\n")
    assert told(foretelling, ACTION + "\n", **other) == []


@pytest.mark.parametrize(
    "params",
    [{"foretell": None}, {"foretell": False}, {"stop_regex": ("q",)}, {"n": 2}, {"max_tokens": 0}],
)
def test_who_does_not_ask_or_cannot_be_told_is_told_nothing(
    foretelling: ProgramContext, params: dict[str, Any]
) -> None:
    for _ in range(12):
        told(foretelling, ACTION + "\n")
    harness = ProgramHarness(foretelling)
    params = {"foretell": True, "stop": ("\n",), **params}
    harness.on(0, text("Where is it?\n"), gen("x", "agent.py:1", **params))
    assert not harness.events.of(wire.LIKELY)


CITIES = ("Bonn", "Kiel", "Jena", "Trier", "Essen", "Gera")
OTHERS = ("Rom", "Oslo", "Bern", "Lyon", "Graz", "Turin")


def told_of(context: ProgramContext, city: str, **session: Any) -> list[str]:
    prompt, output = f"Where is {city}?\n", f"Action: lookup[{city}]\n"
    return [text for text, _ in told(context, output, prompt, session=session)]


def test_what_was_said_of_others_is_told_of_a_new_one(foretelling: ProgramContext) -> None:
    for city in CITIES:
        told_of(foretelling, city)
    assert told_of(foretelling, "Ulm") == ["Action: lookup[Ulm]"]
    for others in ({"account": "bob"}, {"namespace": "n"}, {"history": "h"}):
        assert told_of(foretelling, "Ulm", **others) == []


def test_the_next_output_is_told_while_this_one_runs(foretelling: ProgramContext) -> None:
    numbers = itertools.count(1)

    def likely(one: str, other: str) -> list[str]:
        """Told while the first of two outputs comes."""
        harness = ProgramHarness(foretelling)
        harness.session.record.number = next(numbers)
        params = {"foretell": True, "stop": ("\n",)}
        harness.on(0, text(f"{one} or {other}?\n"), gen("step0", "agent.py:1", **params))
        harness.generate(f"Action: lookup[{one}]\n")
        found = [payload["text"] for _, _, payload in harness.events.of(wire.LIKELY)]
        harness.on(0, text("Found: 3\n"), gen("step1", "agent.py:1", **params))
        harness.generate(f"Action: lookup[{other}]\n")
        return found

    for one, other in zip(CITIES, OTHERS, strict=True):
        likely(one, other)
    assert likely("Ulm", "Hof") == ["Action: lookup[Ulm]", "Action: lookup[Hof]"]


def test_nothing_is_told_under_load(foretelling: ProgramContext) -> None:
    load = [0.0]
    context = replace(foretelling, foreteller=Foreteller(lambda: load[0]))
    for _ in range(12):
        told(context, ACTION + "\n")
    load[0] = 0.9
    assert told(context, ACTION + "\n") == []
    load[0] = 0.1
    assert [text for text, _ in told(context, ACTION + "\n")] == [ACTION]


def test_an_output_that_was_cut_short_is_no_example_of_an_end(foretelling: ProgramContext) -> None:
    for _ in range(12):
        harness = ProgramHarness(foretelling)
        harness.on(0, text("Where is it?\n"), gen("x", "agent.py:1", foretell=True))
        (request,) = harness.queue.open  # type: ignore[attr-defined]
        for token_id in ACTION.encode():
            harness.queue.feed(request, token_id)  # type: ignore[attr-defined]
        harness.session.cancel()
    assert told(foretelling, ACTION + "\n") == []
    assert foretelling.foreteller is not None and foretelling.foreteller.num_gens == 1


@pytest.mark.parametrize(("num_running", "most"), [(1, 40), (64, 8)])
def test_analogies_take_a_share_of_the_time_of_all_that_run(
    context: ProgramContext, num_running: int, most: int
) -> None:
    """A look at this clock takes 0.1 ms, so each question that: with 64 that run, 6.4 of them."""
    ticks = itertools.count()
    foreteller = Foreteller(num_running=lambda: num_running, clock=lambda: 1e-4 * next(ticks))
    context = replace(context, foreteller=foreteller)
    for number in range(40):
        told(context, f"Action: lookup[{number}]\n", prompt=f"Where is {number}?\n")
    counts = foreteller.describe()
    assert counts["num_gens"] == 40, "whatever time there is, outputs are followed"
    assert (counts["num_examples"] == 40) is (most == 40)
    assert 0 < counts["num_examples"] <= most
