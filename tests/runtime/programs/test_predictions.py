"""What becomes of the output that an author expects: from a gen's text to its requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes import FakeQueue
from program_harness import ProgramHarness, gen, text

from stemma.errors import InvalidProgram
from stemma.frontend.protocol import ir, wire
from stemma.runtime.programs.context import ProgramContext


def queue_of(harness: ProgramHarness) -> FakeQueue:
    assert isinstance(harness.queue, FakeQueue)
    return harness.queue


def test_requests_of_all_samples_have_the_ids_of_what_is_expected(harness: ProgramHarness) -> None:
    harness.on(0, text("Q"), gen(prediction="4 <eos>", n=2))
    first, second = queue_of(harness).open
    assert first.prediction.tolist() == second.prediction.tolist() == list(b"4 <eos>")
    assert first.prompt.tolist() == list(b"Q")


def test_what_became_of_it_is_told_with_the_value_and_only_where_there_was_one(
    harness: ProgramHarness,
) -> None:
    harness.on(0, text("Q"), gen("a", prediction="yes"), gen("b"))
    (request,) = queue_of(harness).open
    request.num_drafted_tokens, request.num_accepted_tokens = 5, 3
    request.num_accepted_prediction, request.num_rejected_prediction = 2, 1
    harness.generate("yes")
    harness.generate("no")
    told, bare = (payload["meta"] for _, _, payload in harness.events.of(wire.VALUE))
    assert (told["drafted_tokens"], told["accepted_tokens"]) == (5, 3)
    assert told["accepted_prediction_tokens"] == 2 and told["rejected_prediction_tokens"] == 1
    assert (bare["drafted_tokens"], bare["accepted_tokens"]) == (0, 0)
    assert not any("prediction" in name for name in bare)


def test_a_prediction_that_fits_no_context_fails_its_gen_by_name(context: ProgramContext) -> None:
    harness = ProgramHarness(replace(context, max_text_chars=4))
    harness.on(0, text("Q"), gen(prediction="12345"))
    ((_, _, failed),) = harness.events.of(wire.FAILED)
    assert failed["field"] == "prediction"
    assert "5 characters" in failed["message"] and "at most 4 characters" in failed["message"]
    assert not queue_of(harness).submitted


@pytest.mark.parametrize("value", [3, ["a"], None, True])
def test_a_prediction_that_is_no_text_is_refused_on_the_wire(value: object) -> None:
    with pytest.raises(InvalidProgram, match="prediction"):
        ir.GenParams.from_wire({"prediction": value})
