"""A lock that its holder's end releases, however it ends: `flock` on a file.

The file alone means nothing: one that nobody holds is left over from someone who has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class FileLock:
    """Held from its construction to `release`, or this process's end.

    Raises BlockingIOError where another process holds it, OSError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        while not self._try():
            pass

    def _try(self) -> bool:
        """False where the last holder removed the file between its opening and its locking."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                return True
        except FileNotFoundError:
            pass
        except OSError:
            os.close(self._descriptor)
            raise
        os.close(self._descriptor)
        return False

    def release(self) -> None:
        """Remove the file and let others lock it; safe to call twice."""
        if self._descriptor >= 0:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1
