"""Runs a task on the engine as one response or stream: the entry point of every endpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from ...frontend.client.client import Connection
from ..access.load import Ticket
from ..protocol.caller import Caller, caller_of
from ..protocol.disconnect import refuse_the_gone
from ..protocol.json_route import beside_loop
from ..protocol.pieces import Outcome
from ..protocol.stream_format import EVENT_STREAM, StreamFormat
from ..protocol.task import Reply, Task
from .admission import admitted, ticket_of
from .generation import Generation
from .service import Service
from .stream import EventStream


async def answer(
    service: Service,
    request: Request,
    task: Task,
    reply: Reply,
    stream_format: StreamFormat = EVENT_STREAM,
) -> Response:
    """`stream_format`: that of the reply's pieces.

    Raises InvalidRequest, Refusal, EngineError and GenerationFailed before the first byte."""
    if task.hints is not None:
        task.hints.check(needs_targets=False)
    task = await service.images.resolved(task)
    caller = caller_of(request).salted(task.cache_salt)
    task = admitted(service, request, task)
    connection, running = service.engine.connection, service.running
    carry_out_hints = partial(_carry_out_hints, connection, task, reply, caller)
    ticket = ticket_of(request)
    generation = running.begin(
        task,
        caller,
        reply.id,
        on_outcome=_observer(request, ticket),
        on_used=lambda used: ticket.charge(used.num_tokens),
    )
    is_streaming = False
    try:
        generation.watch(request.receive)
        await generation.start(connection, service.cascade)
        if not task.stream:
            outcomes = await generation.finish()
            _require_reader(generation)
            whole = partial(_whole, reply, outcomes, await carry_out_hints())
            num_bytes = sum(outcome.num_bytes for outcome in outcomes)
            return await beside_loop(request, whole, num_bytes)
        # A refusal comes before the first byte, with its own status.
        await generation.wait(service.settings.stream_ping_s)
        if generation.failure is not None:
            raise generation.failure
        _require_reader(generation)
        is_streaming = True
        return EventStream(
            generation, reply, carry_out_hints, running.streaming, running.clock, stream_format
        )
    finally:
        if not is_streaming:
            running.end(generation)


def _observer(request: Request, ticket: Ticket) -> Callable[[Outcome], None]:
    """Records each outcome for the rate at which the queue drains and for the log."""
    ended: list[Outcome] = []
    request.state.outcomes = ended

    def note(outcome: Outcome) -> None:
        ended.append(outcome)
        ticket.load.note_end()

    return note


def _whole(reply: Reply, outcomes: Sequence[Outcome], hints: dict[str, Any] | None) -> Response:
    return Response(orjson.dumps(reply.whole(outcomes, hints)), media_type="application/json")


def _require_reader(generation: Generation) -> None:
    if generation.is_closed:
        refuse_the_gone()


async def _carry_out_hints(
    connection: Connection, task: Task, reply: Reply, caller: Caller
) -> dict[str, Any] | None:
    if task.hints is None:
        return None
    return await task.hints.carry_out(connection, caller, reply.id, task.lora_path_of(0))
