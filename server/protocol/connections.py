"""Connections as uvicorn keeps them, with what ASGI has no word for: hanging up on a reader, and on
a head without end.

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

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_TRANSPORT = "stemma.transport"
_NO_LINGER = struct.pack("ii", 1, 0)


class HttpProtocol(AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """What `uvicorn.Config(http=...)` is given.

    httptools takes heads of any size, so what comes before one is complete is counted here; h11 has
    a bound of its own (`h11_max_incomplete_event_size`).
    """

    app_state: dict[str, object]
    _num_head_bytes: int | None = None  # None: none has begun that is not complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        state: dict[str, Any] = self.app_state
        self.app_state = {**state, _TRANSPORT: transport}
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """Of httptools."""
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Of httptools."""
        self._num_head_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; what has become too large a head is refused. Bytes count from the read behind the
        one in which it began: what else was in that one may be the end of a large body."""
        had_begun = self._num_head_bytes is not None
        super().data_received(data)
        if not had_begun or self._num_head_bytes is None or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

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
