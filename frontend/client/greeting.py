"""Reads a ZeroMQ peer's greeting, sent before any handshake (ZMTP 3.0, RFC 23, "Greeting").

A peer with another security mechanism disconnects as soon as it has read our whole greeting, often
before it has sent its own, and ZeroMQ then knows no reason. A client that sends only the start of a
greeting receives all of the peer's.
"""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

_START = b"\xff" + bytes(8) + b"\x7f" + b"\x03"  # signature, major version
_NUM_BYTES = 64
_MECHANISM = slice(12, 32)
_TIMEOUT_S = 1.0


def mechanism_of(endpoint: str) -> str | None:
    """NULL, PLAIN, CURVE or another name; None where it is unknown: not over tcp, no listener,
    disconnected, no ZeroMQ."""
    told = b""
    try:
        address = urlsplit(endpoint)
        if address.scheme != "tcp" or address.hostname is None or address.port is None:
            return None
        until_s = time.monotonic() + _TIMEOUT_S
        where = (address.hostname, address.port)
        with socket.create_connection(where, _TIMEOUT_S) as peer:
            peer.sendall(_START)
            while len(told) < _NUM_BYTES:
                peer.settimeout(max(until_s - time.monotonic(), 0.001))
                data = peer.recv(_NUM_BYTES - len(told))
                if not data:
                    return None
                told += data
    except (OSError, ValueError):  # no listener, too slow; an address that only ZeroMQ understands
        return None
    if told[0] != _START[0]:
        return None
    return told[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
