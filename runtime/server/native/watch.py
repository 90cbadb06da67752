"""`/watch`: the engine at work, as server-sent events.

    event: state     what the engine does now: whole at first, then what has changed
    event: engine    it cannot be asked at the moment, and why; `state` events follow once it can

docs/watch.md says what is in them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from ..caller import caller_of
from ..service import Service
from .watch_feed import WatchFeed

MAX_WATCHERS = 64


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    feed = WatchFeed(service.engine)

    @routes.get("/watch", include_in_schema=False)  # endless: nothing for who tries all endpoints
    async def watch(
        request: Request, events: Annotated[int | None, Query(ge=1)] = None
    ) -> StreamingResponse:
        """Events until the client goes, or that many."""
        if len(feed) >= MAX_WATCHERS:
            raise HTTPException(503, f"{MAX_WATCHERS} clients are watching already")
        caller = caller_of(request)
        stream = _stream(feed, "" if caller.is_admin else caller.namespace, events)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    return routes


async def _stream(
    feed: WatchFeed, namespace: str | None, num_events: int | None
) -> AsyncIterator[bytes]:
    num_sent = 0
    with feed.watcher(namespace) as watcher:
        while num_events is None or num_sent < num_events:
            yield await watcher.take()
            num_sent += 1
