"""Whether the server takes work, and how much of it runs."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from .failures import error_response

_ASKING = ("GET", "HEAD", "OPTIONS")  # these ask about the server; all others are work for it
_ALWAYS = ("/abort",)


class Intake:
    """Open until it is closed for good; `num_running` counts requests, used on one event loop."""

    def __init__(self) -> None:
        self.is_open = True
        self.num_running = 0

    def close(self) -> None:
        """Refuse work from now on; what runs goes on."""
        self.is_open = False


class IntakeMiddleware:
    """Counts requests that are work, and refuses them once the intake is closed."""

    def __init__(self, app: ASGIApp, intake: Intake) -> None:
        self._app = app
        self._intake = intake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http" or scope["method"] in _ASKING or scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        if not self._intake.is_open:
            refusal = error_response(503, "the server is being stopped", "server_error")
            refusal.headers["connection"] = "close"
            await refusal(scope, receive, send)
            return
        self._intake.num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._intake.num_running -= 1
