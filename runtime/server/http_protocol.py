"""How much of a request's head is taken before it is refused, with either of uvicorn's parsers."""

from __future__ import annotations

import asyncio

MAX_HEAD_BYTES = 64 * 1024  # request line and headers


def http_protocol() -> type[asyncio.Protocol] | str:
    """For `uvicorn.Config`: httptools' parser with a bound where it is installed, else h11's, which
    has one (`h11_max_incomplete_event_size`)."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class BoundedProtocol(HttpToolsProtocol):
        """Counts what comes before a head is complete: httptools takes any amount."""

        _num_head_bytes: int | None = 0  # None: the head is complete

        def on_message_begin(self) -> None:
            self._num_head_bytes = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._num_head_bytes = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._num_head_bytes is None or self.transport.is_closing():
                return
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    return BoundedProtocol


_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
