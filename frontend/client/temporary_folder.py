"""This process's own folder for what goes with an engine, and those that the dead have left.

A folder holds a lock of the process that made it. `kill -9` leaves the folder; whoever makes the
next one finds the lock free and removes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

import zmq

from ...errors import InvalidRequest
from ...file_lock import FileLock

_PREFIX = "stemma-engine-"
_LOCK = "owner.lock"
_SOCKET = "engine.ipc"
_MOST_BELOW = f"/{_PREFIX}{8 * 'x'}/{_SOCKET}"  # tempfile's names have 8 characters


class TemporaryFolder:
    """A new folder that only this user may enter. Lifetime: until `remove`. Raises
    InvalidRequest."""

    def __init__(self) -> None:
        parent = parent_of_sockets()
        _remove_leftovers(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            with contextlib.suppress(BlockingIOError, FileNotFoundError):  # taken for a leftover
                self._lock = FileLock(self.path / _LOCK)
                return

    @property
    def endpoint(self) -> str:
        """The address of the engine's socket, which lies here."""
        return f"ipc://{self.path / _SOCKET}"

    def remove(self) -> None:
        """Remove it with all that is in it; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()


def parent_of_sockets() -> Path:
    """The folder for temporary files. Raises InvalidRequest where its path leaves too little of
    what the path of a socket may have."""
    parent = tempfile.gettempdir()
    most = zmq.IPC_PATH_MAX_LEN - len(_MOST_BELOW)
    if len(os.fsencode(parent)) > most:
        allowed = f"a path of at most {most} bytes, as sockets lie in it: set a shorter one"
        raise InvalidRequest.of("TMPDIR", parent, allowed)
    return Path(parent)


def _remove_leftovers(parent: Path) -> None:
    """Remove this user's folders whose makers have died."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # held, or removed meanwhile
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    """Raises OSError where its maker lives."""
    if (path / _LOCK).exists():  # else it is being made
        lock = FileLock(path / _LOCK)
        shutil.rmtree(path, ignore_errors=True)
        lock.release()
