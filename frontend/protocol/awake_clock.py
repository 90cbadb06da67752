"""Time as its reader lived it: what passed while the reader itself stood still does not count.

A process may be stopped, starved or suspended for any time and learns of it only afterwards. Who
judges another by its silence therefore reads this clock: one that slept has heard nothing, and that
proves nothing. It is monotonic and knows no date.
"""

from __future__ import annotations

import time

LONGEST_S = 0.5  # the longest that the loops of both sides wait; all limits are longer


class AwakeClock:
    """Seconds, of which each reading adds at most `longest_s` to the one before. For one thread,
    which reads it more often than that while it is awake."""

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self._longest_s = longest_s
        self._awake_s = 0.0
        self._read_s = time.monotonic()

    def read(self) -> float:
        """The time now."""
        read_s = time.monotonic()
        self._awake_s += min(read_s - self._read_s, self._longest_s)
        self._read_s = read_s
        return self._awake_s
