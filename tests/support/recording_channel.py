"""A channel on which a test is the runtime: it records ops and returns scripted events."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from stemma.errors import EngineError
from stemma.frontend.client.backend import Backend
from stemma.frontend.client.channel import EventSink
from stemma.frontend.protocol import ir, wire

Event = tuple[str, Any]  # kind and payload


def value(text: Any, **more: Any) -> Event:
    """The event of an op that is done."""
    return wire.VALUE, {"value": text, "text": text if isinstance(text, str) else "", **more}


def answer_all(op: ir.Op) -> Event | None:
    """A gen returns its name in brackets, a select its first choice; joins and hints are done."""
    if isinstance(op, ir.Gen):
        texts = [f"<{op.name}>"] * (op.params.n or 1)
        return value(texts[0] if len(texts) == 1 else texts, meta={"id": op.seq})
    if isinstance(op, ir.Select):
        return value(op.choices[0], meta={"id": op.seq})
    if isinstance(op, ir.Join):
        return value(None if op.num_needed is None else list(range(op.num_needed)))
    if isinstance(op, ir.Hint):
        return value({"action_id": "1", "outcome": "accepted", "reason": "", "num_tokens": 3})
    if isinstance(op, ir.RoleBegin):
        return wire.MARK, {"text": f"[{op.role}]", "replace": False}
    if isinstance(op, ir.RoleEnd):
        return wire.MARK, {"text": "[end]", "replace": False}
    if isinstance(op, ir.Tokens | ir.Var):
        return value(f"({op.kind})")
    return None


class PlayedChannel:
    """Events are delivered at the program's next flush; with `is_delayed` only by `deliver`, and
    with `is_threaded` on a thread of the channel's."""

    def __init__(
        self,
        answer: Callable[[ir.Op], Event | None] = answer_all,
        *,
        is_delayed: bool = False,
        is_threaded: bool = False,
    ) -> None:
        self.info = {"model": "played"}
        self.ops: dict[int, list[ir.Op]] = defaultdict(list)
        self.creates: dict[int, dict[str, object]] = {}
        self.sending_threads: set[int] = set()
        self.closed: list[int] = []
        self.num_flushes: dict[int, int] = defaultdict(int)
        self._answer = answer
        self._is_delayed = is_delayed
        self._sinks: dict[int, EventSink] = {}
        self._events: dict[int, list[tuple[int, int, str, Any]]] = defaultdict(list)
        self._ids = itertools.count(1)
        self._queue: queue.SimpleQueue[int | None] | None = None
        if is_threaded:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=self._work, daemon=True).start()

    @property
    def backend(self) -> Backend:
        return Backend(self)

    def open_program(self, sink: EventSink, create: dict[str, object]) -> int:
        program = next(self._ids)
        self._sinks[program] = sink
        self.creates[program] = create
        return program

    def send_op(self, program: int, op: ir.Op) -> None:
        if program in self.closed:
            raise EngineError("closed")
        self.sending_threads.add(threading.get_ident())
        self.ops[program].append(op)
        event = self._answer(op)
        if event is not None:
            self._events[program].append((op.branch, op.seq, *event))

    def flush(self, program: int, *, end: bool = False) -> None:
        self.num_flushes[program] += 1
        if end:
            self._events[program].append((0, 0, wire.DONE, None))
        if self._queue is not None:
            self._queue.put(program)
        elif not self._is_delayed:
            self.deliver(program)

    def close_program(self, program: int) -> None:
        self.closed.append(program)

    def call_soon(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.put(None)

    def deliver(self, program: int) -> None:
        """Deliver all events so far."""
        events, self._events[program] = self._events[program], []
        for event in events:
            self._sinks[program].handle_event(*event)

    def deliver_all(self) -> None:
        """Deliver to every program."""
        for program in list(self._sinks):
            self.deliver(program)

    def _work(self) -> None:
        assert self._queue is not None
        while (program := self._queue.get()) is not None:
            self.deliver(program)


def kinds(ops: list[ir.Op]) -> list[str]:
    """The kind of each op, with its branch where that is not the first."""
    return [op.kind if op.branch == 0 else f"{op.kind}@{op.branch}" for op in ops]
