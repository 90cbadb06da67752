"""Values that are not generated text: each is what one program's last op comes to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from fastapi import Request

from ....errors import EngineError
from ....frontend import ir, wire
from ....frontend.client import Connection
from ..access.admission import admit_values, note_value
from ..caller import Caller, caller_of
from ..service import Service
from .disconnect import while_connected
from .pieces import GenerationFailed


async def values_of(
    service: Service,
    request: Request,
    programs: Sequence[Sequence[ir.Op]],
    cache_salt: str | None = None,
) -> list[dict[str, Any]]:
    """What the last op of each program comes to, a select or an embedding: its `value` and `meta`.
    All are cancelled when one fails or the client goes away.

    Raises InvalidRequest, Refusal, EngineError, GenerationFailed, and HTTPException for a client
    that is gone.
    """
    admit_values(service, request, len(programs))
    caller, connection = caller_of(request).salted(cache_salt), service.engine.connection
    with ExitStack() as stack:
        asked = [stack.enter_context(_Asked(connection, caller, ops)) for ops in programs]
        found = await while_connected(request.receive, _all_of(asked))
    for answer in found:
        note_value(request, answer["meta"])
    return found


class _Asked:
    """A program under way; leaving its context cancels what is left of it."""

    def __init__(self, connection: Connection, caller: Caller, ops: Sequence[ir.Op]) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._connection = connection
        create: dict[str, object] = {"seed": 0, "instance": 0, "stream": False}
        if caller.tenant is not None:
            create["tenant"] = caller.tenant
        if caller.namespace:
            create["namespace"] = caller.namespace
        self._program = connection.open_program(self, create)
        try:
            for op in ops:
                connection.send_op(self._program, op)
            connection.flush(self._program, end=True, is_awaited=True)
        except BaseException:
            connection.close_program(self._program)
            raise

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
        if kind in (wire.VALUE, wire.FAILED):
            self._post(kind, payload)

    def handle_disconnect(self, error: EngineError) -> None:
        self._post(wire.FAILED, {"message": str(error), "kind": type(error).__name__})

    def _post(self, kind: str, payload: dict[str, Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, kind, payload)

    # --- on the loop ------------------------------------------------------------------------------

    def _settle(self, kind: str, payload: dict[str, Any]) -> None:
        if self.answer.done():
            return
        if kind == wire.VALUE:
            self.answer.set_result(payload)
        else:
            self.answer.set_exception(GenerationFailed(payload["message"], payload["kind"]))


async def _all_of(asked: Sequence[_Asked]) -> list[dict[str, Any]]:
    return await asyncio.gather(*(each.answer for each in asked))
