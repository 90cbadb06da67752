"""Time as its reader lived it: what passed while the reader itself stood still does not count.

A process may be stopped, starved or suspended for any time and learns of it only afterwards. Who
judges another by its silence therefore reads this clock: one that slept has heard nothing, and that
proves nothing. It is monotonic and knows no date.
"""

from __future__ import annotations

import time
from collections import deque

LONGEST_S = 0.5  # the longest that the loops of both sides wait; all limits are longer
NUM_STEPS = 64  # guess: enough that long steps between short ones are remembered


class AwakeClock:
    """Seconds, of which each reading adds at most `longest_s` to the one before. For one thread,
    which reads it more often than that while it is awake, but for long steps of its work."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._steps_s = deque([longest_s], maxlen=NUM_STEPS)  # what the last ones took
        self._awake_s = 0.0
        self._read_s = time.monotonic()

    def read(self) -> float:
        """The time now."""
        self._take_reading(self._longest_s)
        return self._awake_s

    def read_after_step(self) -> float:
        """The time now, behind a step of work without a reading. It counts in full where one of
        those before it took as long: its reader may have been stopped within it."""
        step_s = self._take_reading(max(self._longest_s, *self._steps_s))
        self._steps_s.append(step_s)
        return self._awake_s

    def _take_reading(self, longest_s: float) -> float:
        """Returns what has passed since the one before, lived or not."""
        read_s = time.monotonic()
        passed_s = read_s - self._read_s
        self._awake_s += min(passed_s, longest_s)
        self._read_s = read_s
        return passed_s
