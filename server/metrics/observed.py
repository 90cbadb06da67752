"""Middleware that counts every request, logs it and, if enabled, traces it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..protocol.caller import CALLER, Caller
from ..protocol.disconnect import CLIENT_CLOSED_REQUEST
from ..protocol.pieces import Outcome
from .http_metrics import OTHER_ROUTE, HttpMetrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD = "other"  # clients may send any method: each name would be a series of its own


@dataclass(slots=True)
class RequestRecord:
    """One request and its response. `caller`: None where it was not admitted; `state` is what
    routes left in `request.state`."""

    method: str
    path: str
    route: str
    client: str | None
    headers: dict[bytes, bytes]
    started_ns: int  # since the epoch
    duration_s: float
    status: int
    is_complete: bool  # the response's last byte was sent
    caller: Caller | None = None
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcomes of a generation, if this was one and it ended."""
        return list(self.state.get("outcomes", ()))

    @property
    def model(self) -> str | None:
        """Of a server with several: the one that was chosen."""
        return self.state.get("model")

    @property
    def request_id(self) -> str | None:
        """The id by which the client may refer to it."""
        return None if self.caller is None else self.caller.request_id


Observer = Callable[[RequestRecord], None]


class Observed:
    """Pure ASGI: adds one call to each message and nothing to a request's body."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, observers: list[Observer]) -> None:
        """`observers` are called for every request when it has ended."""
        self._app = app
        self._metrics = metrics
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, is_complete = CLIENT_CLOSED_REQUEST, False

        async def send_noting(message: Message) -> None:
            nonlocal status, is_complete
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True

        state = scope.setdefault("state", {})
        started_ns, began = time.time_ns(), time.perf_counter()
        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_noting)
        finally:
            self._metrics.in_flight.dec()
            record = RequestRecord(
                method=scope["method"],
                path=scope["path"],
                route=getattr(scope.get("route"), "path", OTHER_ROUTE),
                client=scope["client"][0] if scope.get("client") else None,
                headers=dict(scope["headers"]),
                started_ns=started_ns,
                duration_s=time.perf_counter() - began,
                status=status,
                is_complete=is_complete,
                caller=scope.get(CALLER),
                state=state,
            )
            self._note(record)

    def _note(self, record: RequestRecord) -> None:
        metrics = self._metrics
        method = record.method if record.method in METHODS else OTHER_METHOD
        metrics.requests.labels(record.route, method, str(record.status)).inc()
        metrics.seconds.labels(record.route).observe(record.duration_s)
        if not record.is_complete:
            metrics.disconnects.inc()
        for observe in self._observers:
            observe(record)
