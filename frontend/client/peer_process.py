"""What the system says of the process at the other end of a connection.

Death is the system's to report: a silent process may be slow, starved or stopped. Who stops one
(Ctrl-Z, a debugger, SIGSTOP) means to continue it, so a stopped process is neither dead nor stuck.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

_START_TIME = 19
_ENDED = ("X", "Z")
_NO_PROCESS = ("X",)
_PEER = "Peer-Address"  # libzmq's name; for ipc "HOST:UID:GID:PID" (SO_PEERCRED, Linux)


class PeerProcess(Protocol):
    """A process of this host."""

    def death(self) -> str | None:
        """Why it has ended, or None while it runs."""

    def is_stopped(self) -> bool:
        """Whether it was stopped and may be continued."""


class LocalPeer:
    """The process that listens at an ipc address."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begun = _begun(pid)  # "": it is not seen from here

    def death(self) -> str | None:
        """That it has ended; why is not known."""
        if self._begun in ("", _begun(self._pid)):
            return None
        return f"the engine's process {self._pid} has ended"

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
    return _stat(pid)[0] in ("T", "t")


def _begun(pid: int) -> str:
    """When a process began, which tells it from others with its number; "" where none runs."""
    fields = _stat(pid)
    return "" if fields[0] in _ENDED else fields[_START_TIME]


def _stat(pid: int) -> Sequence[str]:
    """What Linux says of a process, from its state on (proc(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _NO_PROCESS
    return stat.rpartition(")")[2].split()
