"""Carries a task out: programs of its prompts on the engine, one answer or one stream from them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from ....frontend.client import Connection
from ..access.admission import admitted, note_outcome
from ..caller import Caller, caller_of
from ..service import Service
from .completion import Completion
from .pieces import GRAMMAR_KINDS, GenerationFailed, Outcome, Piece
from .task import Reply, Task

_DISCONNECT_POLL_S = 0.2


async def answer(service: Service, request: Request, task: Task, reply: Reply) -> Response:
    """Raises InvalidRequest, EngineError and GenerationFailed before the first byte."""
    if task.hints is not None:
        task.hints.check(needs_targets=False)
    caller = caller_of(request).salted(task.cache_salt)
    task = admitted(service, request, task)
    connection = service.engine.connection
    seed = secrets.randbits(62)
    calls = [
        Completion(
            connection,
            prompt,
            task.params_of(instance),
            n=task.n,
            seed=seed,
            instance=instance,
            stream=task.stream,
            has_token_ids=task.has_token_ids,
            tools=task.tools,
            template_kwargs=task.template_kwargs,
            response_id=None if instance else reply.id,
            tenant=caller.tenant,
            namespace=caller.namespace,
        )
        for instance, prompt in enumerate(task.prompts)
    ]
    items = _merged(calls, task, partial(note_outcome, request, n=task.n))
    if not task.stream:
        outcomes = await _collect(items, task.num_samples, request)
        request.state.outcomes = outcomes  # for the log
        hints = await _carry_out_hints(connection, task, reply, caller)
        return JSONResponse(reply.whole(outcomes, hints))
    first = await anext(items)  # a refusal comes before the first byte, with a status of its own
    request.state.outcomes = outcomes = []
    events = _sse(first, items, connection, task, reply, caller, outcomes)
    return StreamingResponse(events, media_type="text/event-stream")


async def _carry_out_hints(
    connection: Connection, task: Task, reply: Reply, caller: Caller
) -> dict[str, Any] | None:
    if task.hints is None:
        return None
    return await task.hints.carry_out(connection, caller, reply.id)


async def _merged(
    calls: Sequence[Completion], task: Task, on_outcome: Callable[[Outcome], None]
) -> AsyncGenerator[Piece | Outcome, None]:
    """What comes of several prompts, as it comes, with all samples numbered through. Leaving early
    cancels them all."""
    queue: asyncio.Queue[Piece | Outcome | BaseException] = asyncio.Queue()

    async def forward(first: int, call: Completion) -> None:
        try:
            async for item in call.pieces(first):
                queue.put_nowait(item)
        except GenerationFailed as error:
            if error.kind in GRAMMAR_KINDS:
                error.field = task.constraint_field
            queue.put_nowait(error)

    with ExitStack() as stack:
        for call in calls:
            stack.enter_context(call)
        firsts = accumulate((call.n for call in calls), initial=0)
        forwards = [asyncio.create_task(forward(first, call)) for first, call in zip(firsts, calls)]
        num_open = sum(call.n for call in calls)
        try:
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Outcome):
                    on_outcome(item)
                    num_open -= 1
                yield item
        finally:
            for forwarding in forwards:
                forwarding.cancel()


async def _collect(
    items: AsyncGenerator[Piece | Outcome, None], num_samples: int, request: Request
) -> list[Outcome]:
    """All outcomes in order; given up when the client goes away."""
    outcomes: dict[int, Outcome] = {}

    async def drain() -> None:
        async for item in items:
            if isinstance(item, Outcome):
                outcomes[item.index] = item

    task = asyncio.create_task(drain())
    try:
        while not (await asyncio.wait({task}, timeout=_DISCONNECT_POLL_S))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client went away")
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await items.aclose()
    return [outcomes[index] for index in range(num_samples)]


async def _sse(
    first: Piece | Outcome,
    rest: AsyncGenerator[Piece | Outcome, None],
    connection: Connection,
    task: Task,
    reply: Reply,
    caller: Caller,
    outcomes: list[Outcome],
) -> AsyncIterator[bytes]:

    def events(item: Piece | Outcome) -> bytes:
        if isinstance(item, Piece):
            return reply.piece(item)
        outcomes.append(item)
        return reply.end(item)

    try:
        yield events(first)
        async for item in rest:
            yield events(item)
        hints = await _carry_out_hints(connection, task, reply, caller)
        yield reply.close(sorted(outcomes, key=lambda outcome: outcome.index), hints)
    except GenerationFailed as error:
        yield reply.failed(error)
    finally:
        await rest.aclose()
