"""How late the event loop is: what any request may have to wait for the others' sake.

A timer that is due every PERIOD_S measures by how much it is late. While the loop stands still no
timer runs, so those that were due meanwhile are counted as well, each with its own lateness;
otherwise a stall of ten seconds would be one sample among thousands (Tene, "How not to measure
latency": coordinated omission). A quantile is thus one over time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PERIOD_S = 0.02
MAX_MISSED = 3000  # timers that are counted for one stall: a minute's


class LoopLag:
    """Measures on the loop on which it was made. Lifetime: until `stop`."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        """`observe`: called with seconds."""
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._arm()

    def stop(self) -> None:
        """Measure no more."""
        self._timer.cancel()

    def _arm(self) -> None:
        self._due_s = self._loop.time() + PERIOD_S
        self._timer = self._loop.call_at(self._due_s, self._tick)

    def _tick(self) -> None:
        lag_s = max(0.0, self._loop.time() - self._due_s)
        for missed in range(min(int(lag_s / PERIOD_S), MAX_MISSED) + 1):
            self._observe(lag_s - missed * PERIOD_S)
        self._arm()
