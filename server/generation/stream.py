"""A response as a stream, mostly of server-sent events: output is sent at once, a backlog is sent
together.

A plain ASGI response. Its writes wait for the connection (the server's flow control); meanwhile
output waits in the generation, the pieces of a sample joined. A reader that takes nothing is cut
off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...frontend.protocol.awake_clock import AwakeClock
from ..protocol.connections import HttpProtocol, connection_of
from ..protocol.pieces import Outcome
from ..protocol.stream_format import EVENT_STREAM, StreamFormat
from ..protocol.task import Reply
from ..settings import ServerSettings
from .generation import Generation

HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would buffer events
}


class Cut(Enum):
    """Why a stream is cut off."""

    STALLED = "its reader took nothing for too long"
    BEHIND = "its reader is too slow: too much waits for it"


CarryOutHints = Callable[[], Awaitable[dict[str, Any] | None]]


class EventStream(Response):
    """Sends the output of `generation`."""

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        carry_out_hints: CarryOutHints,
        watched_over: Callable[[EventStream], AbstractContextManager[None]],
        clock: AwakeClock,
        stream_format: StreamFormat = EVENT_STREAM,
    ) -> None:
        """`watched_over`: context around the sending; calls `check` periodically, with the time of
        `clock`: a server that was stopped holds that against no reader."""
        super().__init__(headers={"Content-Type": stream_format.media_type, **HEADERS})
        del self.headers["content-length"]
        self.reply_id = reply.id
        self.generation = generation
        self._reply = reply
        self._carry_out_hints = carry_out_hints
        self._watched_over = watched_over
        self._clock = clock
        self._connection: HttpProtocol | None = None
        self._blocked_s: float | None = None  # since when a write waits for the connection
        self._sent_s = 0.0  # when the last write completed
        self._should_ping = False
        self._ping = stream_format.ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = connection_of(scope)
        clock = self._clock

        async def write(body: bytes, more_body: bool = True) -> None:
            self._blocked_s = clock.read()
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
            self._blocked_s, self._sent_s = None, clock.read()

        generation = self.generation
        with self._watched_over(self):
            self._sent_s = clock.read()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not generation.is_over:
                if body := self._body():
                    await write(body)
                await generation.wait()
            if not generation.is_closed:
                await write(self._body() + await self._ending(), more_body=False)

    def _body(self) -> bytes:
        """Events of all output."""
        reply, ping = self._reply, self._ping if self._should_ping else b""
        self._should_ping = False
        events = [
            reply.end(item) if isinstance(item, Outcome) else reply.piece(item)
            for item in self.generation.take()
        ]
        return b"".join(events) or ping

    async def _ending(self) -> bytes:
        generation = self.generation
        if generation.failure is not None:
            return self._reply.failed(generation.failure)
        hints = await self._carry_out_hints()
        outcomes = generation.outcomes
        return self._reply.close([outcomes[index] for index in sorted(outcomes)], hints)

    # --- watched over -----------------------------------------------------------------------------

    def check(self, now: float, settings: ServerSettings) -> Cut | None:
        """Why to cut it off at `now`, or None; pings after silence."""
        if self._blocked_s is not None:
            if now - self._blocked_s > settings.stream_stall_s:
                return Cut.STALLED
            if self.generation.num_waiting_bytes > settings.max_stream_buffer_kb * 1024:
                return Cut.BEHIND
        elif now - self._sent_s > settings.stream_ping_s:
            self._should_ping = True
            self.generation.wake()
        return None

    def cut(self) -> None:
        """End it without its reader: stop generating and drop the connection."""
        self.generation.close()
        if self._connection is not None:
            self._connection.hang_up()
