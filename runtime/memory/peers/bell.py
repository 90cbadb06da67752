"""Wakes another thread's poll."""

from __future__ import annotations

import os
from contextlib import suppress


class Bell:
    """A descriptor that is readable from `ring` until `hush`. Both may be called by any thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """To be polled."""
        return self._read

    def ring(self) -> None:
        """Wake who polls it."""
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def hush(self) -> None:
        """Before what it was rung for is looked at."""
        with suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Nobody polls or rings it any more."""
        os.close(self._write)
        os.close(self._read)
