"""What the system says of the process at the other end of a connection.

Death is the system's to report: a silent process may be slow, starved or stopped. Who stops one
(Ctrl-Z, a debugger, SIGSTOP) means to continue it, so a stopped process is neither dead nor stuck.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import zmq

_PEER = "Peer-Address"  # libzmq's name; for ipc "HOST:UID:GID:PID" (SO_PEERCRED, Linux)


class PeerProcess(Protocol):
    """A process of this host."""

    def death(self) -> str | None:
        """Why it has ended, or None while it runs."""

    def is_stopped(self) -> bool:
        """Whether it was stopped and may be continued."""


class LocalPeer:
    """The process that listens at an ipc address. Its end closes the connection, which tells."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def death(self) -> str | None:
        """None: see above."""
        return None

    def is_stopped(self) -> bool:
        """Whether it was stopped and may be continued."""
        return is_stopped(self._pid)


def local_peer(frame: zmq.Frame) -> LocalPeer | None:
    """The sender of a frame that came over ipc; None where the system does not say which."""
    try:
        pid = str(frame.get(_PEER)).rpartition(":")[2]
    except zmq.ZMQError:
        return None
    return LocalPeer(int(pid)) if pid.isdecimal() and int(pid) else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False where that is not known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
