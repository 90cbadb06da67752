"""Values that are not generated text: each is the result of one program's last op."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from fastapi import Request

from ...errors import EngineError
from ...frontend.client.client import Connection
from ...frontend.protocol import ir, wire
from ..access.load import Ticket
from ..protocol.caller import Caller, caller_of
from ..protocol.disconnect import while_connected
from ..protocol.pieces import GenerationFailed, Used
from .admission import admit_values, ticket_of
from .service import Service


async def values_of(
    service: Service,
    request: Request,
    programs: Sequence[Sequence[ir.Op]],
    cache_salt: str | None = None,
    lora_path: str | None = None,
) -> list[dict[str, Any]]:
    """The result of each program's last op, a select or an embedding: its `value` and `meta`.
    All are cancelled when one fails or the client goes away.

    Raises InvalidRequest, Refusal, EngineError, GenerationFailed, and HTTPException for a client
    that is gone.
    """
    admit_values(service, request, sum(map(_num_requests, programs)))
    caller, connection = caller_of(request).salted(cache_salt), service.engine.connection
    ticket = ticket_of(request)
    with ExitStack() as stack:
        asked = [
            stack.enter_context(_Asked(connection, caller, ticket, lora_path)) for _ in programs
        ]
        return await while_connected(request.receive, _all_of(asked, programs))


def _num_requests(ops: Sequence[ir.Op]) -> int:
    """The engine requests of a program: a select scores each of its choices."""
    last = ops[-1]
    return max(len(last.choices), len(last.choice_ids)) if isinstance(last, ir.Select) else 1


def usage_of_values(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Token counts over all; each choice of a select is a prompt of its own, whose shared first
    part is cached."""
    num_tokens = sum(answer["meta"]["prompt_tokens"] for answer in answers)
    cached = sum(answer["meta"]["cached_tokens"] for answer in answers)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class _Asked:
    """A program, running once it is sent; leaving its context cancels what remains of it."""

    def __init__(
        self,
        connection: Connection,
        caller: Caller,
        ticket: Ticket,
        lora_path: str | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._connection = connection
        self._caller = caller
        self._ticket = ticket
        self._lora_path = lora_path
        self._program: int | None = None
        self.is_closed = False

    def send(self, ops: Sequence[ir.Op]) -> None:
        """On any thread. Raises EngineError and InvalidProgram."""
        create: dict[str, object] = {"seed": 0, "instance": 0, "stream": False}
        if self._caller.tenant is not None:
            create["tenant"] = self._caller.tenant
        if self._caller.namespace:
            create["namespace"] = self._caller.namespace
        if self._lora_path is not None:
            create["lora_path"] = self._lora_path
        self._program = self._connection.open_program(self, create)
        self._connection.send_program(self._program, ops)
        if self.is_closed:  # while another thread was sending
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.is_closed = True
        self._close()

    def _close(self) -> None:
        if self._program is not None:
            self._connection.cancel_program(self._program)

    # --- on the connection's I/O thread -----------------------------------------------------------

    def handle_event(self, branch: int, seq: int, kind: str, payload: Any) -> None:
        if kind in (wire.VALUE, wire.FAILED, wire.DONE):
            self._post(kind, payload)

    def handle_disconnect(self, error: EngineError) -> None:
        self._post(wire.FAILED, {"message": str(error), "kind": type(error).__name__})

    def _post(self, kind: str, payload: dict[str, Any]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, kind, payload)

    # --- on the loop ------------------------------------------------------------------------------

    def _settle(self, kind: str, payload: dict[str, Any]) -> None:
        if kind == wire.DONE:
            used = Used.of(payload)
            self._ticket.charge(used.num_prompt_tokens + used.num_output_tokens)
        if self.answer.done():
            return
        if kind == wire.VALUE:
            self._ticket.load.note_end()
            self.answer.set_result(payload)
        elif kind == wire.FAILED:
            self.answer.set_exception(GenerationFailed(payload["message"], payload["kind"]))


async def _all_of(
    asked: Sequence[_Asked], programs: Sequence[Sequence[ir.Op]]
) -> list[dict[str, Any]]:
    def send() -> None:
        for each, ops in zip(asked, programs, strict=True):
            if not each.is_closed:
                each.send(ops)

    await asyncio.to_thread(send)  # it takes its time, or waits for the engine: others must not
    return await asyncio.gather(*(each.answer for each in asked))
