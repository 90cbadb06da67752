"""Whether the server takes work, and how much of it runs."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..protocol.failures import Refusal

_ASKING = ("GET", "HEAD", "OPTIONS")  # these ask about the server; all others are work for it
_ALWAYS = ("/abort",)
_UNAVAILABLE = "engine_unavailable"


class DrainState:
    """Open until it is closed for good; `num_running` counts requests, used on one event loop."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_running = 0

    def close(self) -> None:
        """Refuse work from now on; what runs goes on."""
        self.is_open = False

    def require_open(self) -> None:
        """Raises Refusal."""
        if not self.is_open:
            reason = "the server is being stopped"
            raise Refusal(503, reason, code=_UNAVAILABLE, headers={"connection": "close"})


class DrainMiddleware:
    """Counts requests that are work, and refuses them once the intake is closed."""

    def __init__(self, app: ASGIApp, drain: DrainState) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it. Raises Refusal."""
        if scope["type"] != "http" or scope["method"] in _ASKING or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        self._drain.require_open()
        self._drain.num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.num_running -= 1
