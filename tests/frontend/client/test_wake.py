"""A thread that wakes the connection's own."""

from __future__ import annotations

import socket

from waiting import ready

from stemma.frontend.client.client import Connection


class RacedSocket:
    """What is sent finds the other thread draining just before."""

    def __init__(self, connection: Connection, inner: socket.socket) -> None:
        self.connection, self.inner = connection, inner

    def send(self, data: bytes) -> int:
        self.connection._drain_wake()
        return self.inner.send(data)


def test_no_byte_is_left_that_would_keep_the_thread_from_sleeping() -> None:
    connection = object.__new__(Connection)
    connection._is_woken = False
    connection._wake_r, inner = socket.socketpair()
    connection._wake_r.setblocking(False)
    connection._wake_w = RacedSocket(connection, inner)  # type: ignore[assignment]
    connection._wake()
    if connection._is_woken:
        connection._drain_wake()
    assert not ready([connection._wake_r], 0)
    connection._wake_r.close()
    inner.close()
