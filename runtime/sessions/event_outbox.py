"""Events of one client that wait to be sent. Streamed output is merged while it waits.

While a client is behind, all output that a gen streamed since the last message is one event, so the
queue grows with the results and not with the number of steps.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

import orjson

from ...frontend.protocol import wire

MAX_DELTA_BYTES = 256 * 1024  # merged text and tokens; beyond it another event begins
EVENT_OVERHEAD_BYTES = 64
TOKEN_ID_BYTES = 8
LOGPROB_BYTES = 100  # approximate size of one as JSON


class _Delta:
    """The streamed output of one gen, still growing."""

    __slots__ = ("branch", "num_bytes", "parts", "program", "seq")

    def __init__(self, program: int, branch: int, seq: int) -> None:
        self.program = program
        self.branch = branch
        self.seq = seq
        self.parts: list[str | dict[str, Any]] = []
        self.num_bytes = 0

    def append(self, part: str | dict[str, Any]) -> int:
        """Returns the approximate number of bytes added."""
        num_bytes = _num_bytes_of(part)
        self.parts.append(part)
        self.num_bytes += num_bytes
        return num_bytes

    def encoded(self) -> bytes:
        return _encoded(self.program, self.branch, self.seq, wire.DELTA, self._merged())

    def _merged(self) -> str | dict[str, Any]:
        """All parts of one gen are texts, or all are objects with the same lists."""
        text = "".join(map(wire.text_of_delta, self.parts))
        objects = [part for part in self.parts if isinstance(part, dict)]
        if not objects:
            return text
        merged = {**objects[0], "text": text}
        for name in ("token_ids", "logprobs"):
            if name in merged:
                merged[name] = list(chain.from_iterable(part[name] for part in objects))
        return merged


class EventOutbox:
    """A FIFO queue of events; `num_bytes` is its approximate size.

    Events of one branch keep their order; a delta may overtake events of other branches.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._events: deque[bytes | _Delta] = deque()
        self._growing: dict[tuple[int, int], _Delta] = {}  # the last event of (program, branch)

    def __bool__(self) -> bool:
        return bool(self._events)

    def append(self, program: int, branch: int, seq: int, kind: str, payload: Any) -> None:
        """Queue an event; one too large for any message becomes a `failed`."""
        if kind == wire.DELTA:
            self._grow(program, branch, seq, payload)
            return
        self._growing.pop((program, branch), None)
        encoded = _encoded(program, branch, seq, kind, payload)
        self.num_bytes += len(encoded)
        self._events.append(encoded)

    def _grow(self, program: int, branch: int, seq: int, part: str | dict[str, Any]) -> None:
        delta = self._growing.get((program, branch))
        if delta is None or delta.seq != seq or delta.num_bytes > MAX_DELTA_BYTES:
            delta = self._growing[program, branch] = _Delta(program, branch, seq)
            self._events.append(delta)
            self.num_bytes += EVENT_OVERHEAD_BYTES
        self.num_bytes += delta.append(part)

    def take(self, max_bytes: int) -> list[bytes]:
        """The first events, encoded: at least one, otherwise at most `max_bytes` of them."""
        taken: list[bytes] = []
        num_bytes = 0
        while self._events:
            first = self._events[0]
            encoded = first.encoded() if isinstance(first, _Delta) else first
            if taken and num_bytes + len(encoded) > max_bytes:
                break
            self._drop_first(first)
            taken.append(encoded)
            num_bytes += len(encoded)
        return taken

    def _drop_first(self, event: bytes | _Delta) -> None:
        self._events.popleft()
        if isinstance(event, bytes):
            self.num_bytes -= len(event)
            return
        self.num_bytes -= event.num_bytes + EVENT_OVERHEAD_BYTES
        key = (event.program, event.branch)
        if self._growing.get(key) is event:
            del self._growing[key]


def _num_bytes_of(part: str | dict[str, Any]) -> int:
    if isinstance(part, str):
        return len(part)
    num_logprobs = sum(1 + len(entry["top"]) for entry in part.get("logprobs", ()))
    num_ids = len(part.get("token_ids", ()))
    return len(part["text"]) + TOKEN_ID_BYTES * num_ids + LOGPROB_BYTES * num_logprobs


def _encoded(program: int, branch: int, seq: int, kind: str, payload: Any) -> bytes:
    try:
        encoded = orjson.dumps([program, branch, seq, kind, payload])
        if len(encoded) <= wire.MAX_FRAME_BYTES - 1024:  # the rest is the header's
            return encoded
        reason = f"a result of {len(encoded)} bytes; at most {wire.MAX_FRAME_BYTES} can be sent"
    except TypeError as error:
        reason = f"the result cannot be sent: {error}"
    failure = {"message": reason, "kind": "ProtocolError", "op": "result"}
    return orjson.dumps([program, branch, seq, wire.FAILED, failure])
