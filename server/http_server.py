"""uvicorn as `stemma serve` runs it: its limits, and how it stops.

On SIGTERM or SIGINT it accepts no more work and continues running requests, including programs over
ZeroMQ, until they end or the drain timeout passes; the rest are notified and ended. A second signal
ends the wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from fastapi import FastAPI

from ..errors import EngineError
from ..frontend.protocol.awake_clock import AwakeClock
from .generation.service import Service
from .metrics.loop_lag import LoopLag
from .protocol.connection_table import ConnectionTable, backlog_of, limit_of_files, most_connections
from .protocol.connections import HttpProtocol

log = logging.getLogger(__name__)

LAST_WORDS_S = 2.0  # to send the last events of streams
HANG_UP_S = 0.5  # after which connections that are still busy are closed,
ABORT_S = 1.5  # and those that still are, whatever they have to send
CLOSE_S = 3  # more than the sum of those
# Objects between collections of the youngest, and how many of those between the older ones'. Each
# keeps all threads waiting. By default a body of 32,000 lists causes 45.
GC_THRESHOLDS = (50_000, 2, 250)
_POLL_S = 0.05
_LEAST_GRACE_S = 5.0  # that a connection has beyond its stream, on a machine that is busy


class Engines(Protocol):
    """What the server stops with itself: an `EngineSupervisor`, or those of several models."""

    def wait_started(self) -> object:
        """Return once the first engine is ready. Raises EngineError where it never will be."""

    def num_programs(self, timeout_s: float) -> int:
        """Programs that run, of all clients."""

    def drain(self) -> None:
        """Accept no new programs."""

    def abandon(self, reason: str) -> None:
        """Fail everything that HTTP requests still wait for."""

    def stop(self) -> None:
        """End all."""


def serve(
    engine: Engines,
    app: FastAPI,
    listener: socket.socket,
    announce: Callable[[], None],
) -> int:
    """Serve `app` at `listener` until stopped, then stop the engine too; returns the exit status.
    `announce` is called once the engine is ready for the first time."""
    gc.collect()
    gc.freeze()  # what the imports made: no collection needs to look at it again
    gc.set_threshold(*GC_THRESHOLDS)
    service: Service = app.state.service
    server = HttpServer(uvicorn_config(app, service), engine, service, announce)
    server.run(sockets=[listener])
    return server.exit_status


def uvicorn_config(app: FastAPI, service: Service) -> uvicorn.Config:
    """How uvicorn serves `app`; each call is for a server of its own."""
    settings, metrics = service.settings, service.metrics
    num_files = limit_of_files()
    most = most_connections(num_files)
    most = min(settings.max_connections or most, most)
    table = ConnectionTable(most, lambda reason: metrics.dropped_connections.labels(reason).inc())
    metrics.connections.set_function(lambda: table.num_connections)
    # A stream is cut off before, and counted there.
    unread_timeout_s = settings.stream_stall_s + max(settings.stream_stall_s, _LEAST_GRACE_S)
    return uvicorn.Config(
        app,
        http=cast(Any, partial(HttpProtocol, table, unread_timeout_s)),
        ws="none",
        backlog=backlog_of(num_files),
        timeout_keep_alive=int(settings.keep_alive_s),
        timeout_graceful_shutdown=CLOSE_S,
        log_config=None,  # the process's own
        log_level="warning",
        access_log=False,
        server_header=False,
    )


class HttpServer(uvicorn.Server):
    """Lifetime: one `run`."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engines,
        service: Service,
        announce: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.exit_status = 0
        self._engine = engine
        self._drain_s = service.settings.drain_s
        self._drain_state = service.drain_state
        self._metrics = service.metrics
        self._announce = announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_hurried = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook: begin to listen."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._lag = LoopLag(self._metrics.loop_lag.observe)
        self._tasks.append(asyncio.create_task(self._await_engine()))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook: close all connections. The engine's end ends all calls to it."""
        loop = asyncio.get_running_loop()
        loop.call_later(HANG_UP_S, self._hang_up)
        loop.call_later(ABORT_S, self._hang_up, True)
        await super().shutdown(sockets)
        self._lag.stop()
        await asyncio.to_thread(self._engine.stop)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's hook: a signal asks to stop."""
        if self._loop is None:  # nothing has started
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._be_asked_to_stop)

    async def _await_engine(self) -> None:
        try:
            await asyncio.to_thread(self._engine.wait_started)
        except (EngineError, RuntimeError) as error:  # the latter: there is no thread to wait in
            if self._drain_state.is_open:  # no signal has come
                print(f"stemma serve: {error}", file=sys.stderr)
                self.exit_status = 1
                self.should_exit = True
        else:
            self._announce()

    def _hang_up(self, is_urgent: bool = False) -> None:
        """Disconnect clients whose streams never end or who do not read, as if they had left."""
        for connection in list(self.server_state.connections):
            if is_urgent and isinstance(connection, HttpProtocol):
                connection.hang_up()
            else:
                connection.transport.close()

    def _be_asked_to_stop(self) -> None:
        if self._drain_state.is_open:
            self._drain_state.close()
            self._engine.drain()
            self._tasks.append(asyncio.create_task(self._drain()))
        else:
            self._is_hurried.set()

    async def _drain(self) -> None:
        await self._until_idle()
        reason = f"the server was stopped; this had {self._drain_s:g} s to end"
        if self._is_hurried.is_set():
            reason = "the server was stopped at once"
        if self._drain_state.num_running:
            log.warning("%d requests are ended: %s", self._drain_state.num_running, reason)
        self._engine.abandon(reason)
        for _ in range(round(LAST_WORDS_S / _POLL_S)):
            if not self._drain_state.num_running:
                break
            await asyncio.sleep(_POLL_S)
        self.should_exit = True

    async def _until_idle(self) -> None:
        """Wait until nothing runs any more, its time is over, or the wait is cut short."""
        has_said = False
        clock = AwakeClock(LAST_WORDS_S + 1.0)  # longer than each look below takes
        until_s = clock.read() + self._drain_s
        while not self._is_hurried.is_set() and clock.read() < until_s:
            num_programs = await asyncio.to_thread(self._engine.num_programs, LAST_WORDS_S)
            num_requests = self._drain_state.num_running
            if not has_said:
                has_said = True
                log.warning(
                    "being stopped: %d requests and %d programs left, with %g s to end; a second "
                    "signal (Ctrl-C) ends them at once",
                    num_requests, num_programs, self._drain_s,
                )  # fmt: skip
            if not num_requests and not num_programs:
                return
            await asyncio.sleep(_POLL_S)
