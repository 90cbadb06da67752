"""The connections of a server: how many there may be, and which one must go for another.

A connection is either busy, as its client waits for an answer, or the server awaits its client: a
head, the rest of a body, the next request. Where there is no room for a new one, an awaited one
goes: the one that has been longest, of the address that has the most of them. So whoever asks is
let in however many say nothing. Where all are busy, a few spare ones are let in, and may ask the
probes only.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Protocol

BACKLOG = 4096  # connections that wait to be accepted; the kernel's own limit may be lower
OWN_FILES = 64  # of this process: to the engine, logs, models, one that is being started anew
NUM_SPARE = 16


class Member(Protocol):
    """A connection."""

    @property
    def peer(self) -> str:
        """The client's address."""

    def drop(self) -> None:
        """Close it now."""


def limit_of_files() -> int:
    """Of this process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files if files != resource.RLIM_INFINITY else 1 << 20


def backlog_of(num_files: int) -> int:
    """What may wait to be accepted under a limit of open files: all of it is accepted before the
    first one of it is looked at, so it needs files, too."""
    return max(1, min(BACKLOG, (num_files - OWN_FILES - NUM_SPARE) // 3))


def most_connections(num_files: int) -> int:
    """What a limit of open files leaves."""
    return max(1, num_files - OWN_FILES - NUM_SPARE - backlog_of(num_files))


class ConnectionTable:
    """Knows of all connections. Invariant: at most `max_connections` and the spare ones, beside
    those that are being closed."""

    def __init__(self, max_connections: int, note_dropped: Callable[[str], None]) -> None:
        """`note_dropped`: called with the reason for each that is closed without an answer."""
        self._most = max_connections
        self.note_dropped = note_dropped
        self._all: set[Member] = set()
        self._awaited: dict[str, dict[Member, None]] = {}  # by peer, the longest awaited first

    @property
    def num_connections(self) -> int:
        """Those that are open."""
        return len(self._all)

    def enter(self, connection: Member) -> bool:
        """A new one; whether it is a spare one. May drop another one, or itself."""
        self._all.add(connection)
        is_spare = False
        if len(self._all) > self._most:
            victim = self._longest_awaited()
            is_spare = victim is None and len(self._all) <= self._most + NUM_SPARE
            if not is_spare:
                self._drop(victim or connection)
        self.await_client(connection)
        return is_spare

    def await_client(self, connection: Member) -> None:
        """From now on it is its client's turn."""
        self.be_busy(connection)
        if connection in self._all:
            self._awaited.setdefault(connection.peer, {})[connection] = None

    def be_busy(self, connection: Member) -> None:
        """Its client has asked, and waits."""
        of_peer = self._awaited.get(connection.peer, {})
        of_peer.pop(connection, None)
        if not of_peer:
            self._awaited.pop(connection.peer, None)

    def leave(self, connection: Member) -> None:
        """It is closed, or as good as closed."""
        self._all.discard(connection)
        self.be_busy(connection)

    def _longest_awaited(self) -> Member | None:
        if not self._awaited:
            return None
        peer = max(self._awaited, key=lambda peer: len(self._awaited[peer]))
        return next(iter(self._awaited[peer]))

    def _drop(self, connection: Member) -> None:
        self.leave(connection)
        self.note_dropped("full")
        connection.drop()
