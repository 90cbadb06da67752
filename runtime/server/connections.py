"""Connections as uvicorn keeps them, with what ASGI has no word for: hanging up on a reader.

An ASGI application can only stop sending; the server then waits until the reader has taken what was
sent, which one that reads nothing never does. So the transport goes along in the request's state.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_TRANSPORT = "stemma.transport"
_NO_LINGER = struct.pack("ii", 1, 0)


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """What `uvicorn.Config(http=...)` is given."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        state: dict[str, Any] = self.app_state
        self.app_state = {**state, _TRANSPORT: transport}
        super().connection_made(transport)

    def eof_received(self) -> None:
        """The client sends no more; what it has asked for is given up as if it had gone. What it
        has not read would keep the connection open, and nobody would be told."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def transport_of(scope: Scope) -> asyncio.Transport | None:
    """The connection of a request; None where another server than ours runs the application."""
    transport: asyncio.Transport | None = scope.get("state", {}).get(_TRANSPORT)
    return transport


def hang_up(transport: asyncio.Transport) -> None:
    """End a connection now, what was sent and not read included."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None:  # else the kernel keeps what it was given until the reader takes it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
