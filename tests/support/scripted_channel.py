"""A runtime that responds at once from a table, for tests of how a client uses the results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from stemma.frontend.client.channel import EventSink
from stemma.frontend.dsl.function import open_program
from stemma.frontend.dsl.state import ProgramState
from stemma.frontend.protocol import ir, wire


class ScriptedChannel:
    """Completes every op when it is flushed. `metas` has the meta of a gen or select by its name (a
    list of them for samples), `failing` the names of those that fail."""

    def __init__(self, metas: dict[str, Any] | None = None, failing: tuple[str, ...] = ()) -> None:
        self.info = {"model": "scripted"}
        self._metas = metas or {}
        self._failing = failing
        self._sinks: dict[int, EventSink] = {}
        self._ops: dict[int, list[ir.Op]] = {}

    @property
    def channel(self) -> ScriptedChannel:
        """Itself: it also serves as a backend."""
        return self

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        number = len(self._sinks) + 1
        self._sinks[number], self._ops[number] = sink, []
        return number

    def send_op(self, program: int, op: ir.Op) -> None:
        self._ops[program].append(op)

    def flush(self, program: int, *, end: bool = False) -> None:
        ops, self._ops[program] = self._ops[program], []
        for op in ops:
            self._answer(self._sinks[program], op)
        if end:
            self._sinks[program].handle_event(0, 0, wire.DONE, None)

    def close_program(self, program: int) -> None:
        self._ops[program] = []

    def call_soon(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        pass

    def _answer(self, sink: EventSink, op: ir.Op) -> None:
        name = getattr(op, "name", "")
        if name in self._failing:
            payload = {"message": "no <b>luck</b>", "kind": "EngineError", "op": name}
            sink.handle_event(op.branch, op.seq, wire.FAILED, payload)
        elif isinstance(op, ir.Gen | ir.Select):
            value = {"value": f"<{name}>", "text": f"<{name}>", "meta": self._metas.get(name, {})}
            sink.handle_event(op.branch, op.seq, wire.VALUE, value)
        elif isinstance(op, ir.Join | ir.Var):
            sink.handle_event(op.branch, op.seq, wire.VALUE, {"value": None, "text": ""})
        elif isinstance(op, ir.Hint):
            outcome = {"action_id": "1", "outcome": "clipped", "reason": "budget", "num_tokens": 7}
            sink.handle_event(op.branch, op.seq, wire.VALUE, {"value": outcome, "text": ""})
        elif isinstance(op, ir.RoleBegin | ir.RoleEnd | ir.Tokens):
            sink.handle_event(op.branch, op.seq, wire.MARK, {"text": "", "replace": False})


def open_scripted(channel: ScriptedChannel, name: str = "program") -> ProgramState:
    """A program on it, to be ended by hand."""
    return open_program(channel, name=name)  # type: ignore[arg-type]
