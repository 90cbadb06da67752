"""A program's results while one of its branches goes on from a failure: every reader has them."""

from __future__ import annotations

import threading

import pytest
from scripted_channel import ScriptedChannel
from waiting import PATIENCE_S, wait_until

from stemma.errors import ProgramError
from stemma.frontend.client.program import Pending, Program
from stemma.frontend.protocol import ir, wire

FAILURE = {"message": "no luck", "kind": "ProgramError"}


class Reader:
    """Waits on a thread for an op's result, as readers of a streaming run do."""

    def __init__(self, program: Program, pending: Pending) -> None:
        self.error: BaseException | None = None
        self._program, self._pending = program, pending
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._program.wait(self._pending)
        except BaseException as error:
            self.error = error

    def join(self) -> BaseException | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "it was not woken"
        return self.error


class SlowChannel(ScriptedChannel):
    """Has a reader begin while a `Resume` is on its way, and answers nothing by itself."""

    program: Program
    pending: Pending
    error: BaseException | None = None

    def send_op(self, program: int, op: ir.Op) -> None:
        if isinstance(op, ir.Resume):
            self.error = Reader(self.program, self.pending).join()

    def flush(self, program: int, *, end: bool = False) -> None: ...


def test_a_reader_that_comes_while_a_branch_goes_on_has_its_error() -> None:
    channel = SlowChannel()
    channel.program = program = Program(channel, seed=0)
    program.runner = threading.get_ident()
    channel.pending = pending = program.send(ir.Gen(0, 0, None, "x", ir.GenParams()))
    program.handle_event(0, 0, wire.FAILED, FAILURE)
    with pytest.raises(ProgramError, match="no luck"):
        program.wait(pending)
    program.resume(0, 1, program.first_lost(0))
    assert isinstance(channel.error, ProgramError)


def test_who_waits_for_an_op_of_a_message_that_is_dropped_is_woken() -> None:
    channel = SlowChannel()
    channel.program = program = Program(channel, seed=0)
    begin = program.send(ir.RoleBegin(0, 0, None, "user"))
    channel.pending = program.send(ir.Gen(0, 1, None, "x", ir.GenParams()))
    program.send(ir.RoleEnd(0, 2, None))
    program.handle_event(0, 1, wire.FAILED, FAILURE)
    reader = Reader(program, begin)
    wait_until(lambda: bool(program.waiters._wakers))
    program.resume(0, 3, program.first_lost(0))
    assert isinstance(reader.join(), ProgramError)
