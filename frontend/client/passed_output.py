"""A child process's output on its way to this process's standard error: passed on as it comes, and
its last lines known, so that its end can be told with its own words."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import IO

_STDERR = 2
_CHUNK_BYTES = 65_536
_KEPT_BYTES = 16_384  # of its end
_END_S = 0.5  # a child of the process that has ended may keep the pipe open


class PassedOutput:
    """Lifetime: until the last writer of the pipe has ended. Thread-safe."""

    def __init__(self, pipe: IO[bytes], num_lines: int) -> None:
        """`pipe` is closed at its end; `num_lines`: how many `last_lines` has at most."""
        self._pipe = pipe
        self._num_lines = num_lines
        self._kept = b""
        self._thread = threading.Thread(target=self._pass_on, name="stemma-output", daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Of what has come; to be asked once the process has ended."""
        self._thread.join(_END_S)
        return self._kept.decode(errors="replace").strip().splitlines()[-self._num_lines :]

    def _pass_on(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _CHUNK_BYTES):
                self._kept = (self._kept + chunk)[-_KEPT_BYTES:]
                with contextlib.suppress(OSError):  # nobody reads it: the process goes on
                    os.write(_STDERR, chunk)
