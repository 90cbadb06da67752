"""The file of an ipc endpoint: taken by one runtime at a time, and removed when that stops.

ZeroMQ replaces whatever lies at the path. So a lock is taken beside it first, and only a socket
that nobody listens at is replaced.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from ...errors import ProtocolError
from ...file_lock import FileLock

SCHEME = "ipc://"
LOCK_SUFFIX = ".lock"


class IpcFile:
    """Held from before the bind until `release`. Raises ProtocolError where the path is taken."""

    def __init__(self, endpoint: str) -> None:
        self._path = Path(endpoint.removeprefix(SCHEME))
        if not self._path.name:
            raise ProtocolError(f"cannot listen at {endpoint}: it names no file")
        lock_path = self._path.with_name(self._path.name + LOCK_SUFFIX)
        try:
            self._lock = FileLock(lock_path)
        except BlockingIOError:
            reason = f"another runtime listens there and holds {lock_path}"
            raise ProtocolError(f"cannot listen at {endpoint}: {reason}") from None
        except OSError as error:
            raise ProtocolError(f"cannot listen at {endpoint}: {error}") from error
        obstacle = _obstacle(self._path)
        if obstacle is not None:
            self._lock.release()
            raise ProtocolError(f"cannot listen at {endpoint}: {obstacle}")

    def release(self) -> None:
        """Remove the socket and the lock."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._lock.release()


def has_file(endpoint: str) -> bool:
    """Whether it is a path, and neither of Linux's abstract names nor for ZeroMQ to choose."""
    return endpoint.startswith(SCHEME) and not endpoint.startswith((f"{SCHEME}@", f"{SCHEME}*"))


def remove_leftovers(folder: Path) -> None:
    """Remove the files of runtimes that have died."""
    for lock_path in folder.glob(f"*{LOCK_SUFFIX}"):
        with contextlib.suppress(OSError):  # held, or removed meanwhile
            lock = FileLock(lock_path)
            lock_path.with_suffix("").unlink(missing_ok=True)
            lock.release()


def _obstacle(path: Path) -> str | None:
    """Why what lies at the path is not to be replaced; None where it may be, or nothing does."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)
    if not stat.S_ISSOCK(found.st_mode):
        return "there is something that is no socket; remove it, or choose another address"
    if found.st_uid != os.getuid():
        return f"the socket there belongs to another user (uid {found.st_uid})"
    return "another process listens there" if _has_listener(path) else None


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its queue is full: somebody is there, though busy or stopped
            return True
    return True
