"""An HTTP client of raw bytes: it sends anything, reads as little as it likes, and may reset."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

END_OF_BODY = b"\r\n0\r\n\r\n"


class RawClient:
    """One connection."""

    def __init__(self, url: str, *, receive_bytes: int | None = None) -> None:
        """`receive_bytes`: the kernel's receive buffer for a reader that does not read."""
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self.sock = socket.socket()
        if receive_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.sock.settimeout(120)
        self.sock.connect((self.host, parts.port))

    def post(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
        self.sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def read_until(self, mark: bytes, at_once: int = 65_536) -> bytes:
        """Bytes up to the mark or the end, read in pieces of `at_once`."""
        data = b""
        while mark not in data and (part := self.sock.recv(at_once)):
            data += part
        return data

    def read_all(self, at_once: int = 65_536) -> bytes:
        """The whole response of a stream."""
        return self.read_until(END_OF_BODY, at_once)

    def close(self) -> None:
        self.sock.close()

    def half_close(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Disconnect as a crashed client does: RST, not FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


WAYS_TO_GO: dict[str, Callable[[RawClient], None]] = {
    "close": RawClient.close,
    "half_close": RawClient.half_close,
    "reset": RawClient.reset,
}


def events_of(answer: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events, chunked encoding undone; without [DONE]."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    datas = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    return [json.loads(data) for data in datas if data != b"[DONE]"]
