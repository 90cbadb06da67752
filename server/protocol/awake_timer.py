"""A timer that counts the time in which its event loop ran.

A process that was stopped, starved or blocked finds all its timers due at once, before it has
looked at what came meanwhile: that a client was silent then is not the client's doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

STEP_S = 1.0  # the most that any time without a look at the loop counts


class AwakeTimer:
    """At most one call that is to come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left_s = 0.0
        self._call: Callable[[], None] | None = None
        self._step: asyncio.Handle | None = None
        self._step_ends_s = 0.0  # NOTE: uvloop's handle of a very short step does not know its time

    @property
    def is_running(self) -> bool:
        """Whether the call is to come."""
        return self._step is not None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it after so many seconds, in place of what was to be called."""
        self.stop()
        self._left_s, self._call = seconds, call
        self._begin_step()

    def stop(self) -> float:
        """Call nothing; returns the seconds that were left."""
        if self._step is None:
            return 0.0
        left_s = self._left_s + max(0.0, self._step_ends_s - self._loop.time())
        self._step.cancel()
        self._step = self._call = None
        return left_s

    def _begin_step(self) -> None:
        step_s = min(STEP_S, self._left_s)
        self._left_s -= step_s
        self._step_ends_s = self._loop.time() + step_s
        self._step = self._loop.call_later(step_s, self._end_step)

    def _end_step(self) -> None:
        call = self._call
        assert call is not None
        if self._left_s > 0:
            self._begin_step()
        else:
            self.stop()
            call()
