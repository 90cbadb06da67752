"""Whether the server accepts work, and how many requests run."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from ..protocol.failures import Refusal

_ASKING = ("GET", "HEAD", "OPTIONS")  # these only ask about the server; all other methods are work
_ALWAYS = ("/abort",)
_UNAVAILABLE = "engine_unavailable"


class DrainState:
    """Open until closed for good; `num_running` counts requests. Used on one event loop."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_running = 0

    def close(self) -> None:
        """Refuse work from now on; running requests continue."""
        self.is_open = False

    def require_open(self) -> None:
        """Raises Refusal when closed."""
        if not self.is_open:
            reason = "the server is being stopped"
            raise Refusal(503, reason, code=_UNAVAILABLE, headers={"connection": "close"})


class DrainMiddleware:
    """Counts requests that are work, and refuses them once draining has begun."""

    def __init__(self, app: ASGIApp, drain: DrainState) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point. Raises Refusal."""
        if scope["type"] != "http" or scope["method"] in _ASKING or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        self._drain.require_open()
        self._drain.num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.num_running -= 1
