"""uvicorn's connections, with what it and ASGI lack: limits, and disconnecting a reader.

A connection on which nothing comes is closed: `HEAD_TIMEOUT_S` after it began, or after the first
bytes of a head, or of anything else that is no request. (How long a body may take is for
`access/request_body.py`, how long a reader of a stream for `generation/stream.py`.) An ASGI
application can only stop sending; the server then waits until the reader has taken what was sent,
forever if it reads nothing. So the request's state also carries the connection.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from functools import partial
from typing import Any

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .awake_timer import AwakeTimer
from .connection_table import ConnectionTable

MAX_HEAD_BYTES = 64 * 1024  # request line and headers
HEAD_TIMEOUT_S = 10.0
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_CONNECTION = "stemma.connection"
_FRAMING = (b"content-length", b"transfer-encoding")
_NO_LINGER = struct.pack("ii", 1, 0)


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    httptools takes heads and trailers of any size and remembers what it has of them, so the bytes
    of which nothing has come yet are counted here.
    """

    app_state: dict[str, object]
    transport: asyncio.Transport

    def __init__(
        self, table: ConnectionTable, unread_timeout_s: float, *args: Any, **kwargs: Any
    ) -> None:
        """`unread_timeout_s`: in which a reader must take something of what waits for it."""
        super().__init__(*args, **kwargs)
        self.peer = ""
        self._unread_timeout_s = unread_timeout_s
        self.is_spare = False
        self._table = table
        self._head_timer = AwakeTimer(self.loop)
        self._reader_timer = AwakeTimer(self.loop)
        self._is_in_head = False
        self._num_pending_bytes = (
            0  # read since a message, its head or a part of its body was whole
        )
        self._overtaken: list[Any] = []  # cycles of requests that later ones follow already
        self.parser = _Parser(self)
        self._is_declining = False  # an upgrade: the head that is being read is that of its body

    # --- the transport's callbacks ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.app_state = {**self.app_state, _CONNECTION: self}
        super().connection_made(transport)
        self.peer = "" if self.client is None else self.client[0]
        self.is_spare = self._table.enter(self)
        self._head_timer.start(HEAD_TIMEOUT_S, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.stop()
        self._reader_timer.stop()
        self._table.leave(self)
        for cycle in self._overtaken:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse; refuse what grows too large. Counting starts at the read after the one in which it
        began: the rest of that read may be the end of a large body."""
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
        if not self._head_timer.is_running and not self._is_answering:
            self._head_timer.start(HEAD_TIMEOUT_S, self._give_up)

    def eof_received(self) -> None:
        """The client sends no more; drop its requests as if it had left. Unread output would keep
        the connection open without notice to anybody."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    # --- the parser's callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_declining:
            return
        self._is_in_head, self._num_pending_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; httptools calls this for trailers too, which must not become headers: they come
        when what they would change has been decided, or is being decided."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_declining:
            self._is_declining = False
            return
        self._is_in_head, self._num_pending_bytes = False, 0
        self._head_timer.stop()
        self._overtaken = [cycle for cycle in self._overtaken if not cycle.response_complete]
        if self._is_answering:
            self._overtaken.append(self.cycle)
        super().on_headers_complete()
        if self.parser.should_upgrade():  # declined
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing:
            return  # the parser takes what follows for another protocol; see `decline_upgrade`
        self._num_pending_bytes = 0
        super().on_message_complete()
        if self._is_answering:
            self._table.be_busy(self)

    def decline_upgrade(self, rest: bytes) -> None:
        """Read what follows the head of an upgrade: the body of a request as any other. Java's
        clients offer HTTP/2 so with each first request. Raises httptools.HttpParserError."""
        if framing := self._framing:
            self._is_declining = True
            self.parser = _Parser(self)
            lines = (b"POST / HTTP/1.1", *(name + b": " + value for name, value in framing))
            self.parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    @property
    def _framing(self) -> list[tuple[bytes, bytes]]:
        """The headers that say how long the body is; none where there is none."""
        return [(name, value) for name, value in self.headers if name in _FRAMING]

    # --- the answer's end -------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """uvicorn's hook; it begins the next pipelined request, or waits for one."""
        super().on_response_complete()
        if not self._is_answering:
            self._table.await_client(self)
            self._await_reader()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's hook: what came is no HTTP."""
        super().send_400_response(msg)
        self._await_reader()

    def pause_writing(self) -> None:
        """The transport's callback: much waits for the reader."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The transport's callback: the reader has taken most of it."""
        super().resume_writing()
        self._reader_timer.stop()
        if not self._is_answering:
            self._await_reader()

    def _await_reader(self, num_unread: int | None = None) -> None:
        """Hang up if the client takes nothing of what waits for it."""
        left = self.transport.get_write_buffer_size()
        if num_unread is not None and left >= num_unread:
            self._table.note_dropped("unread")
            self.hang_up()
        elif left:
            self._reader_timer.start(self._unread_timeout_s, partial(self._await_reader, left))

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- closing ----------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """No head has come in time."""
        self._table.note_dropped("silent")
        self._refuse(_TOO_LATE if self._is_in_head else b"")

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()
        self._await_reader()

    def drop(self) -> None:
        """Close it now."""
        if self.transport.get_write_buffer_size():
            self.hang_up()
        else:
            self.transport.close()

    def hang_up(self) -> None:
        """Close it now, and drop what was sent and not yet read."""
        sock: socket.socket | None = self.transport.get_extra_info("socket")
        if sock is not None:  # else the kernel keeps sent data until the reader takes it
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()


class _Parser(httptools.HttpRequestParser):
    """One that leaves what follows an upgrade to its connection."""

    def __init__(self, connection: HttpProtocol) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: ignore it
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        """Bytes as they come."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._connection.decline_upgrade(data[upgrade.args[0] :])


def connection_of(scope: Scope) -> HttpProtocol | None:
    """The connection of a request; None where another server runs the application."""
    connection: HttpProtocol | None = scope.get("state", {}).get(_CONNECTION)
    return connection
