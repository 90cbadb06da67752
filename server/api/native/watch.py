"""`/watch`: the engine at work, as server-sent events.

    event: state     what the engine does now: whole at first, then the changes
    event: engine    the engine cannot be asked now, and why; `state` events resume once it can
    event: fleet     of several engines: how each of them is, once a second

docs/serve/watch.md describes the content.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from ....errors import EngineError, InvalidRequest
from ...generation.service import Service
from ...protocol.caller import caller_of
from ...protocol.connections import connection_of
from .watch_feed import WatchFeeds

MAX_WATCHERS = 64


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    feeds = WatchFeeds(service.engine)

    @routes.get("/watch", include_in_schema=False)  # would hang tools that try all endpoints
    async def watch(
        request: Request,
        events: Annotated[int | None, Query(ge=1)] = None,
        replica: Annotated[int | None, Query(ge=0)] = None,
    ) -> StreamingResponse:
        """Events until the client goes, or that many; of several engines those of `replica`."""
        if len(feeds) >= MAX_WATCHERS:
            raise HTTPException(503, f"{MAX_WATCHERS} clients are watching already")
        caller = caller_of(request)
        which = None if replica is None else await _known(service, replica)
        stream = _stream(feeds, which, None if caller.is_admin else caller.namespace, events)
        return FeedResponse(stream, service.settings.stream_stall_s)

    return routes


class FeedResponse(StreamingResponse):
    """Events for a reader that keeps up; a reader that stalls is disconnected."""

    def __init__(self, stream: AsyncIterator[bytes], stall_s: float) -> None:
        """`stall_s`: how long a write may wait for the reader."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(stream, media_type="text/event-stream", headers=headers)
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError as error:
                connection = connection_of(scope)
                if connection is not None:
                    connection.hang_up()
                raise OSError("its reader took nothing for too long") from error

        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send_in_time)


async def _known(service: Service, replica: int) -> int | None:
    """The replica, if there is one; None: the one engine. Raises InvalidRequest."""
    numbers = [0]
    try:
        if service.has_replicas:
            fleet = await service.engine.connection.acall("fleet", asks=False)
            numbers = [told["replica"] for told in fleet["replicas"]]
        if replica not in numbers:
            raise InvalidRequest.of("replica", replica, f"one of {numbers}")
        return replica if service.has_replicas else None
    except EngineError:
        return replica  # its events tell why there are none


async def _stream(
    feeds: WatchFeeds, replica: int | None, namespace: str | None, num_events: int | None
) -> AsyncIterator[bytes]:
    num_sent = 0
    with feeds.watcher(replica, namespace) as watcher:
        while num_events is None or num_sent < num_events:
            yield await watcher.take()
            num_sent += 1
