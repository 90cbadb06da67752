"""One model's part in a cascade: it answers, and it scores what a smaller one has said.

Each call is a program of its own on the model's connection, which begins with the whole prompt; the
engine has the prompt's KV from the call before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import EngineError, StemmaError
from ..client.client import Connection
from ..protocol import ir, wire

OnDelta = Callable[[Any], None]  # a delta's payload, see `wire.DELTA`
OnUsed = Callable[[Mapping[str, int]], None]  # a program's end, see `wire.DONE`


class CallFailed(StemmaError):
    """A model refused or failed; `kind` names the class of its error."""

    def __init__(self, message: str, kind: str, field: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field


@dataclass(frozen=True, slots=True)
class Ask:
    """What all models of a cascade are asked alike: how a program begins, and what is generated."""

    ops: tuple[ir.Op, ...]  # of branch 0
    params: ir.GenParams
    create: Mapping[str, object]  # the program's header; `stream`: whether the answer is streamed
    prompt: str | list[dict[str, Any]]  # as a function of the author's sees it


@dataclass(frozen=True, slots=True)
class Scored:
    """A text's tokens with a model, and the log probability of each. `meta`: the call's."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    meta: Mapping[str, Any]


class EngineCall:
    """One program on a connection. Lifetime: that of `carry_out`, or of the task that awaits it."""

    def __init__(self, connection: Connection, on_used: OnUsed | None = None) -> None:
        self._connection = connection
        self._on_used = on_used
        self._program: int | None = None
        self._ends_now = False

    async def gen(
        self,
        ask: Ask,
        params: ir.GenParams,
        begun: Sequence[int] = (),
        on_delta: OnDelta | None = None,
    ) -> dict[str, Any]:
        """A value event's payload. `begun`: the ids with which the output begins. Raises CallFailed
        and EngineError."""
        op = ir.Gen(0, len(ask.ops), None, "completion", params)
        given = {(0, op.seq): begun} if begun else None
        return await self._carry_out(ask, op, given, on_delta)

    async def score(self, ask: Ask, text: str) -> Scored:
        """How likely the model would have said this, not empty, text: one step reads it whole.
        Raises CallFailed and EngineError."""
        op = ir.Select(0, len(ask.ops), None, "scores", (text,))
        meta = (await self._carry_out(ask, op, None, None))["meta"]
        return Scored(meta["choice_token_ids"][0], meta["choice_token_logprobs"][0], meta)

    async def select(self, ask: Ask, op: ir.Select) -> dict[str, Any]:
        """The same of a select. Raises CallFailed and EngineError."""
        return await self._carry_out(ask, replace(op, branch=0, seq=len(ask.ops)), None, None)

    def end_now(self) -> None:
        """Have it end with what it has, or as soon as it begins."""
        self._ends_now = True
        if self._program is not None:
            self._connection.end_gens(self._program)

    async def _carry_out(
        self,
        ask: Ask,
        op: ir.Op,
        begun: Mapping[tuple[int, int], Sequence[int]] | None,
        on_delta: OnDelta | None,
    ) -> dict[str, Any]:
        connection, events = self._connection, _Events()
        create = {**ask.create, "stream": on_delta is not None}
        self._program = number = connection.open_program(events, create, begun)
        has_ended = False
        try:
            ops = (*ask.ops, op)
            if connection.has_credit:
                connection.send_program(number, ops)
            else:  # it waits for the engine: others must not
                await asyncio.to_thread(connection.send_program, number, ops)
            if self._ends_now:
                connection.end_gens(number)
            value: dict[str, Any] | None = None
            async for kind, seq, payload in events:
                if kind == wire.DELTA and on_delta is not None:
                    on_delta(payload)
                elif kind == wire.VALUE and seq == op.seq:
                    value = payload
                elif kind == wire.FAILED:
                    failure = payload["message"], payload["kind"], payload.get("field")
                    raise CallFailed(*failure)
                elif kind == wire.DONE:
                    has_ended = True
                    if self._on_used is not None and payload is not None:
                        self._on_used(payload)
            if value is None:
                raise EngineError("the model's program has ended without an answer")
            return value
        finally:
            if not has_ended:
                connection.close_program(number)


class _Events:
    """An `EventSink` whose events are awaited on the event loop that made it; DONE is the last."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[str, int, Any]] = asyncio.Queue()

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        self._post((kind, seq, payload))

    def handle_disconnect(self, error: EngineError) -> None:
        failure = {"message": str(error), "kind": type(error).__name__}
        self._post((wire.FAILED, 0, failure))

    def _post(self, event: tuple[str, int, Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def __aiter__(self) -> Any:
        while True:
            event = await self._queue.get()
            yield event
            if event[0] == wire.DONE:
                return


def num_kept(logprobs: Iterable[float], least: float) -> int:
    """How many tokens from the first on have at least this log probability."""
    count = 0
    for logprob in logprobs:
        if logprob < least:
            break
        count += 1
    return count
