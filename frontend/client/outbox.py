"""A client's queue before its connection: ops by program, then messages.

Ops wait in their program's outbox until it is flushed; then they become one item of the queue,
which the I/O thread drains into as few messages as it can. The order of the queue is the order on
the wire. Guarded by the connection's lock; a finalizer may run between any two lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..protocol import wire
from ..protocol.link import Link

MESSAGE_BYTES = 1024 * 1024  # guess: enough to be worth a message


class ProgramOutbox:
    """Ops of one program that have not been flushed yet."""

    __slots__ = ("create", "num_bytes", "ops")

    def __init__(self, create: bytes) -> None:
        self.create: bytes | None = create
        self.ops: list[bytes] = []  # encoded
        self.num_bytes = 0


@dataclass(slots=True)
class _Programs:
    """Items of one future `ops` message."""

    items: list[bytes]
    num_bytes: int  # of their ops, which count against the credit
    size: int


@dataclass(frozen=True, slots=True)
class _Other:
    """Any other future message; `num_bytes` of it count against the credit."""

    op: str
    header: dict[str, Any]
    num_bytes: int


class Outbox:
    """Everything queued on one connection.

    `held_bytes` counts what was queued and not acknowledged: the used credit.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.dirty: dict[int, ProgramOutbox] = {}  # those that hold ops
        self._programs: dict[int, ProgramOutbox] = {}
        self._queue: deque[_Programs | _Other] = deque()
        self._on_the_way: deque[tuple[int, int]] = deque()  # (number of the message, bytes held)

    @property
    def has_queued(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._queue)

    def open(self, program: int, create: bytes, given: Iterable[bytes] = ()) -> None:
        """Add a new program; `given`: ahead of its ops, see `wire.encode_program`."""
        self._programs[program] = ProgramOutbox(create)
        for part in given:
            self.give(program, part)

    def give(self, program: int, given: bytes) -> None:
        """Behind its ops so far: what some that follow have become elsewhere."""
        outbox = self._programs.get(program)
        if outbox is None:
            return
        self.flush(program)
        create, outbox.create = outbox.create, None
        self._queue_item(wire.encode_program(program, (), create, end=False, given=given), 0)

    def add(self, program: int, encoded: bytes) -> bool:
        """Add an op of a program; False where the program is no longer open."""
        outbox = self._programs.get(program)
        if outbox is None:
            return False
        num_bytes = len(encoded)
        if outbox.ops and outbox.num_bytes + num_bytes > MESSAGE_BYTES:
            self.flush(program)
        outbox.ops.append(encoded)
        outbox.num_bytes += num_bytes
        self.held_bytes += num_bytes
        self.dirty[program] = outbox
        return True

    def flush(self, program: int, *, end: bool = False) -> bool:
        """Queue a program's ops; returns whether there were any."""
        outbox = self._programs.get(program)
        self.dirty.pop(program, None)  # first: what a finalizer adds later marks it dirty again
        if outbox is None:
            return False
        if end:
            del self._programs[program]
        elif not outbox.ops:
            return False
        fresh: list[bytes] = []
        ops, outbox.ops = outbox.ops, fresh
        num_bytes, outbox.num_bytes = outbox.num_bytes, 0
        create, outbox.create = outbox.create, None
        self._queue_item(wire.encode_program(program, ops, create, end=end), num_bytes)
        return True

    def flush_all(self) -> None:
        """Queue the ops of all programs."""
        for program in list(self.dirty):
            self.flush(program)

    def forget(self, program: int) -> bool:
        """Drop a program and its ops; returns whether some were handed over before."""
        outbox = self._programs.pop(program, None)
        self.dirty.pop(program, None)
        if outbox is not None:
            self.held_bytes -= outbox.num_bytes
        return outbox is None or outbox.create is None

    def queue(self, op: str, header: dict[str, Any], num_bytes: int = 0) -> None:
        """Queue a message of another kind after what is queued."""
        self.held_bytes += num_bytes
        self._queue.append(_Other(op, header, num_bytes))

    def clear(self) -> None:
        """Drop everything."""
        self._programs.clear()
        self.dirty.clear()
        self._queue.clear()

    def _queue_item(self, item: bytes, num_bytes: int) -> None:
        """Add the item to the last message of the queue while that has room."""
        last = self._queue[-1] if self._queue else None
        if isinstance(last, _Programs) and last.size + len(item) <= MESSAGE_BYTES:
            last.items.append(item)
            last.num_bytes += num_bytes
            last.size += len(item)
        else:
            self._queue.append(_Programs([item], num_bytes, len(item)))

    # --- on the I/O thread ------------------------------------------------------------------------

    def hand_over(self, link: Link) -> None:
        """Number the queued messages and pass them to the link."""
        for message in self._take_queue():
            if isinstance(message, _Programs):
                link.put_list("ops", "programs", message.items)
            else:
                link.put(message.op, **message.header)
            if message.num_bytes:
                self._on_the_way.append((link.num_put, message.num_bytes))

    def _take_queue(self) -> Iterator[_Programs | _Other]:
        while self._queue:
            yield self._queue.popleft()

    def release(self, num_acked: int) -> bool:
        """The runtime has acknowledged this many messages; returns whether that freed credit."""
        before = self.held_bytes
        while self._on_the_way and self._on_the_way[0][0] <= num_acked:
            self.held_bytes -= self._on_the_way.popleft()[1]
        return self.held_bytes != before
