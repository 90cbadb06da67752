"""One completion asked for over HTTP, as a one-branch program on the engine's connection.

The HTTP process is a client of the engine like any other. A completion is awaited on an asyncio
loop; events come from the connection's I/O thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ...errors import EngineError
from ...frontend import ir, wire
from ...frontend.client import Connection


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished completion: its text, and counts and times as `get_meta_info` gives them."""

    text: str
    meta: dict[str, Any]


class CompletionFailed(Exception):
    """The runtime refused or failed; `kind` names the class of its error."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Completion:
    """A running completion; use it as a context manager, so that leaving early cancels it."""

    def __init__(
        self,
        connection: Connection,
        prompt: str | Sequence[int] | Sequence[Message],
        params: ir.GenParams,
        *,
        seed: int,
        instance: int = 0,
        stream: bool = False,
    ) -> None:
        """`prompt`: raw text, token ids, or the messages of a chat."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._connection = connection
        create: dict[str, object] = {"seed": seed, "instance": instance, "stream": stream}
        self._program = connection.open_program(self, create)
        for op in _ops(prompt, params):
            connection.send_op(self._program, op)
        connection.flush(self._program, end=True)

    async def deltas(self) -> AsyncIterator[str | Outcome]:
        """Text as it comes (with `stream`), then the outcome. Raises CompletionFailed."""
        while True:
            kind, payload = await self._events.get()
            if kind == wire.DELTA:
                yield payload
            elif kind == wire.VALUE:
                yield Outcome(payload["text"], payload["meta"])
                return
            elif kind == wire.FAILED:
                raise CompletionFailed(payload["message"], payload["kind"])

    async def outcome(self) -> Outcome:
        """The whole. Raises CompletionFailed."""
        async for item in self.deltas():
            if isinstance(item, Outcome):
                return item
        raise AssertionError("a completion ends with an outcome or an error")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close_program(self._program)

    # --- on the connection's I/O thread -----------------------------------------------------------

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind in (wire.DELTA, wire.VALUE, wire.FAILED):
            self._post(kind, payload)

    def handle_disconnect(self, error: EngineError) -> None:
        self._post(wire.FAILED, {"message": str(error), "kind": type(error).__name__})

    def _post(self, kind: str, payload: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (kind, payload))


def _ops(prompt: str | Sequence[int] | Sequence[Message], params: ir.GenParams) -> Sequence[ir.Op]:
    if isinstance(prompt, str):
        return (ir.Text(0, 0, None, prompt), ir.Gen(0, 1, None, "completion", params))
    if all(isinstance(item, int) for item in prompt):
        token_ids = tuple(int(item) for item in prompt)  # type: ignore[arg-type]
        return (ir.Tokens(0, 0, None, token_ids), ir.Gen(0, 1, None, "completion", params))
    return _chat_ops([m for m in prompt if isinstance(m, Message)], params)


def _chat_ops(messages: Sequence[Message], params: ir.GenParams) -> Sequence[ir.Op]:
    """An assistant's earlier turn is a replay: its ids may be known. A last message of the
    assistant's is continued."""
    ops: list[ir.Op] = []
    for index, message in enumerate(messages):
        is_replay = message.role == "assistant"
        is_open = is_replay and index == len(messages) - 1
        ops.append(ir.RoleBegin(0, len(ops), None, message.role))
        if message.content:
            ops.append(ir.Text(0, len(ops), None, message.content, is_replay and not is_open))
        if not is_open:
            ops.append(ir.RoleEnd(0, len(ops), None))
    if not messages or messages[-1].role != "assistant":
        ops.append(ir.RoleBegin(0, len(ops), None, "assistant"))
    ops.append(ir.Gen(0, len(ops), None, "completion", params))
    return ops
