"""uvicorn's connections, with two features that ASGI lacks: disconnecting a reader, and bounding
the request head.

An ASGI application can only stop sending; the server then waits until the reader has taken what was
sent, forever if it reads nothing. So the request's state also carries the transport.
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
    """The protocol class for `uvicorn.Config(http=...)`.

    httptools takes heads of any size, so the bytes of an incomplete head are counted here; h11 has
    a bound of its own (`h11_max_incomplete_event_size`).
    """

    app_state: dict[str, object]
    _num_head_bytes: int | None = None  # None: no head is incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:
        state: dict[str, Any] = self.app_state
        self.app_state = {**state, _TRANSPORT: transport}
        super().connection_made(transport)

    def on_message_begin(self) -> None:
        """httptools's callback."""
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """httptools's callback."""
        self._num_head_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; refuse a head that grows too large. Counting starts at the read after the one in
        which the head began: the rest of that read may be the end of a large body."""
        had_begun = self._num_head_bytes is not None
        super().data_received(data)
        if not had_begun or self._num_head_bytes is None or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def eof_received(self) -> None:
        """The client sends no more; drop its requests as if it had left. Unread output would keep
        the connection open without notice to anybody."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()


def transport_of(scope: Scope) -> asyncio.Transport | None:
    """The connection of a request; None where another server runs the application."""
    transport: asyncio.Transport | None = scope.get("state", {}).get(_TRANSPORT)
    return transport


def hang_up(transport: asyncio.Transport) -> None:
    """End a connection now, and drop what was sent and not yet read."""
    sock: socket.socket | None = transport.get_extra_info("socket")
    if sock is not None:  # else the kernel keeps sent data until the reader takes it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()
