"""The programs of one connection that have not ended, and what each needs to outlive its runtime.

A runtime may end, or be started anew, while a client's programs run. The client has what it sent
and what came back (`ProgramLog`), so it opens them again on the next one, from where they are.
Guarded by the connection's lock, but for `get`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import EngineError, InvalidProgram
from ..protocol import wire
from ..protocol.program_log import MAX_LOST, ProgramLog
from .channel import EventSink
from .outbox import Outbox


@dataclass(frozen=True, slots=True)
class OpenProgram:
    """Where its events go; its log, where it is to outlive its runtime."""

    sink: EventSink
    create: dict[str, Any]
    log: ProgramLog | None


class OpenPrograms:
    """By their numbers."""

    def __init__(self, *, have_logs: bool) -> None:
        self._have_logs = have_logs
        self._programs: dict[int, OpenProgram] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._programs

    def get(self, number: int) -> OpenProgram | None:
        """None: it has ended."""
        return self._programs.get(number)

    def open(
        self, number: int, sink: EventSink, create: dict[str, Any], given: Sequence[list[Any]] = ()
    ) -> bytes:
        """Add one; returns its encoded `create`. `given`: what its ops are to become, see
        `ProgramLog.restore`. Raises InvalidProgram if it cannot be sent."""
        program = OpenProgram(sink, create, ProgramLog(create) if self._have_logs else None)
        if program.log is not None:
            program.log.restore([*given])
        encoded = _encoded(program)
        self._programs[number] = program
        return encoded

    def pop(self, number: int) -> OpenProgram | None:
        """Remove one."""
        return self._programs.pop(number, None)

    def take_all(self) -> list[OpenProgram]:
        """Remove all."""
        programs, self._programs = list(self._programs.values()), {}
        return programs

    def note_op(self, number: int, item: list[Any]) -> None:
        """It has an op more, as on the wire, with all texts."""
        log = self._log_of(number)
        if log is not None:
            log.take([item])

    def note_end(self, number: int) -> None:
        """No op follows."""
        if (log := self._log_of(number)) is not None:
            log.has_ended = True

    def note_cancelled(self, number: int) -> None:
        """Nothing of it is wanted but its `DONE`."""
        if (log := self._log_of(number)) is not None:
            log.is_cancelled = True

    def note_ended_gens(self, number: int) -> None:
        """Its gens end with what they have."""
        if (log := self._log_of(number)) is not None:
            log.ends_gens = True

    def _log_of(self, number: int) -> ProgramLog | None:
        program = self._programs.get(number)
        return None if program is None else program.log

    def go_on(
        self, outbox: Outbox, loss: EngineError, *, is_new: bool = True
    ) -> Iterator[tuple[EventSink, str, Any]]:
        """Open them all again, by a new outbox; `is_new`: the runtime that was lost had them.
        Yields the events that end those which cannot go on, as (sink, kind, payload) of the program
        as a whole."""
        for number in list(self._programs):
            program = self._programs.get(number)
            if program is None or program.log is None:  # a finalizer may have closed it
                continue
            program.log.lose(is_asked=not is_new)
            try:
                if not program.log.is_cancelled:
                    _reopen(number, program, program.log, outbox, loss)
                    continue
            except (InvalidProgram, EngineError) as error:
                failure = {"message": str(error), "kind": type(error).__name__, "op": "program"}
                yield program.sink, wire.FAILED, failure
            outbox.forget(number)
            self._programs.pop(number, None)
            yield program.sink, wire.DONE, program.log.done({})


def _reopen(
    number: int, program: OpenProgram, log: ProgramLog, outbox: Outbox, loss: EngineError
) -> None:
    """Raises EngineError where it may be the cause, InvalidProgram where it cannot be sent."""
    if log.num_lost >= MAX_LOST:
        raise EngineError(f"{log.num_lost} engines in a row have ended with this program: {loss}")
    outbox.open(number, _encoded(program), log.given())
    for op in log.ops:
        outbox.add(number, wire.encode_op(op))
    outbox.flush(number, end=log.has_ended)
    if log.ends_gens:
        outbox.queue("cancel", {"program": number, "keep": True})


def _encoded(program: OpenProgram) -> bytes:
    log = program.log
    return wire.encode_create(program.create if log is None else log.adapted(program.create))
