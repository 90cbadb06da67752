"""Programs whose long texts are tokenized beside the loop have the tokens they always had."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from fakes import FakeQueue
from program_harness import (
    Op,
    ProgramHarness,
    end,
    fork,
    gen,
    join,
    resume,
    role,
    role_end,
    text,
    tokens,
    var,
)
from program_harness import select as select_
from waiting import ready

from stemma.frontend.protocol import ir, wire
from stemma.runtime.programs import session
from stemma.runtime.programs.context import AssistantTurnCache, ProgramContext
from stemma.runtime.programs.preparation import TOKEN_CHARS, Preparation
from stemma.runtime.programs.text_threads import TextThreads
from stemma.runtime.tokenizer.transcript import Transcript

HANGS_S = 60.0


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextThreads]:
    """Any text with a character counts as long."""
    monkeypatch.setattr(session, "UNLOCKED_CHARS", 1)
    threads = TextThreads()
    yield threads
    threads.close()


def harness_on(context: ProgramContext, threads: TextThreads | None) -> ProgramHarness:
    return ProgramHarness(
        replace(context, texts=threads, queue=FakeQueue(), assistant_turns=AssistantTurnCache())
    )


def settle(harness: ProgramHarness) -> None:
    """Until nothing is being tokenized."""
    threads = harness.context.texts
    if threads is None:
        return
    while any(b.call is not None and hasattr(b.call, "run") for b in branches(harness)):
        assert ready([threads], HANGS_S), "a text was never tokenized"
        threads.collect()
        harness.session.advance()


def branches(harness: ProgramHarness) -> list[Any]:
    return list(harness.session._branches.values())


def play(harness: ProgramHarness) -> list[Any]:
    """A program with ops of all kinds; returns its prompts, in order, and its events."""
    queue, prompts = harness.queue, []
    assert isinstance(queue, FakeQueue)
    answers = itertools.cycle(["one", "two!", "3"])

    def answer_all() -> None:
        settle(harness)
        while queue.open:
            prompts.append(queue.open[0].prompt.tolist())
            if queue.open[0].scoring is None:
                queue.generate(queue.open[0], list(next(answers).encode()))
            else:
                queue.score(queue.open[0], [-1.0] * len(queue.open[0].scoring.targets))
            harness.session.advance()
            settle(harness)

    harness.on(0, role("system"), text("be"), text(" brief"), role_end(), role("user"))
    harness.on(0, text("hello é"), tokens(65, 66), text("!"), role_end(), role("assistant"))
    harness.on(0, gen("a"))
    answer_all()
    harness.on(0, role_end(), text("loose"), fork(1, 2))
    harness.on(1, text("left "), gen("b"), end())
    harness.on(2, text("right "), var(1, 1), select_("yes", "no"), end())
    answer_all()
    harness.on(0, join(1, 2, mode="concate_and_append"), text(" done "), gen("c"), end=True)
    answer_all()
    assert harness.is_done
    return [prompts, harness.values, harness.failures, harness.events.of(wire.MARK)]


def test_tokens_values_and_their_order_are_the_same(
    context: ProgramContext, threads: TextThreads
) -> None:
    plain = play(harness_on(context, None))
    beside = play(harness_on(context, threads))
    assert beside == plain and len(plain[0]) == 5


def test_a_long_prediction_is_tokenized_beside_the_loop(
    context: ProgramContext, threads: TextThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "UNLOCKED_CHARS", 4)
    harness = harness_on(context, threads)
    harness.on(0, text("Q"), gen(prediction="expected"))
    assert not harness.prompts, "it waits for its prediction"
    settle(harness)
    (request,) = harness.queue.open
    assert request.prediction.tolist() == list(b"expected")


@pytest.mark.parametrize("failing", [tokens(9999), select_("yes", "")], ids=["tokens", "select"])
def test_a_branch_goes_on_behind_the_text_before_an_op_that_failed(
    context: ProgramContext, threads: TextThreads, failing: Op
) -> None:
    prompts = []
    for beside in (None, threads):
        harness = harness_on(context, beside)
        harness.on(0, text("kept "), failing, text("lost"), gen())
        settle(harness)
        assert list(harness.failures) == [0]
        harness.on(0, resume(), text("on"), gen())
        settle(harness)
        prompts.append(harness.prompts)
    assert prompts == [["kept on"]] * 2


def test_ids_to_choose_from_are_decoded_beside_the_loop(
    context: ProgramContext, threads: TextThreads
) -> None:
    harness = harness_on(context, threads)
    choice = ir.Select(0, 0, None, "s", (), ir.CHOICES_METHODS[0], ((65,), (66, 67)))
    decode, decoders = context.tokenizer.decode, []

    def decoded(ids: Any, **options: Any) -> str:
        decoders.append(threading.current_thread().name)
        return decode(ids, **options)

    with patch.object(context.tokenizer, "decode", decoded):
        harness.on(0, text("pick "), lambda branch, seq: replace(choice, seq=seq))
        settle(harness)
        for request, logprobs in zip(list(harness.queue.open), ([-9.0], [-1.0, -1.0]), strict=True):
            harness.queue.score(request, logprobs)
        harness.session.advance()
    assert harness.values == {(0, 1): "BC"} and decoders == ["stemma-texts"] * 2


def test_ids_to_choose_from_count_as_much_to_decode(context: ProgramContext) -> None:
    choice = ir.Select(0, 0, None, "s", (), ir.CHOICES_METHODS[0], ((65,), (66, 67)))
    transcript = Transcript(context.tokenizer, context.template)
    assert Preparation(context, "", transcript, (), (), choice).num_chars == 3 * TOKEN_CHARS


def test_a_text_that_fits_no_prompt_fails_its_branch(
    context: ProgramContext, threads: TextThreads
) -> None:
    harness = harness_on(replace(context, max_prompt_tokens=4), threads)
    harness.on(0, fork(1, 2))
    harness.on(1, text("too long"), gen())
    harness.on(2, text("fits"), gen())
    settle(harness)
    assert list(harness.failures) == [1] and "prompt is too long" in harness.failures[1]
    assert harness.prompts == ["fits"]


def test_a_program_that_is_cancelled_hears_nothing_of_its_texts(
    context: ProgramContext, threads: TextThreads
) -> None:
    harness, other = harness_on(context, threads), harness_on(context, threads)
    harness.on(0, text("long"), gen())
    harness.session.cancel()
    other.on(0, text("another's"), gen())
    settle(other)
    assert other.prompts == ["another's"]
    assert not harness.prompts and not harness.events.items


def test_a_defect_on_the_thread_is_raised_on_the_loop(
    context: ProgramContext, threads: TextThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(context.tokenizer, "encode_array", fail)
    harness = harness_on(context, threads)
    harness.on(0, text("long"), gen())
    with pytest.raises(ZeroDivisionError, match="a defect"):
        settle(harness)
