"""So much a minute, evenly: a leaky bucket (the generic cell rate algorithm, ITU-T I.371)."""

from __future__ import annotations

import asyncio
import time

BURST_S = 1.0  # what may be taken at once, as so much time


class RateLimit:
    """Owned by one event loop. None: no limit. Takers wait in the order in which they came."""

    def __init__(self, per_minute: float | None) -> None:
        self._second_each = None if per_minute is None else 60.0 / per_minute
        self._free_at_s = 0.0  # when all that was taken has leaked away

    async def take(self, amount: float) -> None:
        """Wait until so much may be taken."""
        if self._second_each is None:
            return
        now_s = time.monotonic()
        wait_s = self._free_at_s - now_s - BURST_S
        self._free_at_s = max(self._free_at_s, now_s) + amount * self._second_each
        if wait_s > 0:
            await asyncio.sleep(wait_s)
