"""Programs that are opened again on another runtime."""

from __future__ import annotations

from typing import Any

from stemma.errors import EngineError
from stemma.frontend.client.open_programs import OpenPrograms
from stemma.frontend.client.outbox import Outbox
from stemma.frontend.protocol import wire
from stemma.frontend.protocol.program_log import MAX_LOST

GEN = ["gen", 0, 0, None, "a", {}]
LOSS = EngineError("it was killed")


class Sink:
    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None: ...

    def handle_disconnect(self, error: EngineError) -> None: ...


def opened() -> OpenPrograms:
    programs = OpenPrograms(have_logs=True)
    programs.open(7, Sink(), {"seed": 1})
    programs.note_op(7, GEN)
    return programs


def test_a_program_goes_on_until_too_many_have_ended_amid_its_call() -> None:
    programs = opened()
    for _ in range(MAX_LOST - 1):
        outbox = Outbox()
        assert list(programs.go_on(outbox, LOSS)) == [] and outbox.has_queued
    (failed, done) = programs.go_on(Outbox(), LOSS)
    assert failed[1] == wire.FAILED and "engines in a row" in failed[2]["message"]
    assert "it was killed" in failed[2]["message"] and done[1] == wire.DONE
    assert 7 not in programs


def test_a_word_of_it_in_between_starts_the_count_anew() -> None:
    programs = opened()
    for num_seen in range(3 * MAX_LOST):
        assert list(programs.go_on(Outbox(), LOSS)) == []
        program = programs.get(7)
        assert program is not None and program.log is not None
        ids = list(range(num_seen + 1))  # what was seen comes again, and one more
        told = program.log.pass_on(0, 0, wire.DELTA, {"text": "x" * len(ids), "token_ids": ids})
        assert told == "x"


def test_a_cancelled_program_ends_with_its_runtime() -> None:
    programs = opened()
    programs.note_cancelled(7)
    ((_, kind, payload),) = programs.go_on(Outbox(), LOSS)
    assert kind == wire.DONE and payload["num_requests"] == 0
    assert 7 not in programs
