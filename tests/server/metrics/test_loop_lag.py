"""The loop's lag: a stall counts as long as it took."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from stemma.server.metrics.loop_lag import PERIOD_S, LoopLag

STALL_S = 25 * PERIOD_S


def test_a_stall_is_seen_by_every_timer_that_it_kept_from_running() -> None:
    async def stall() -> list[float]:
        seen: list[float] = []
        lag = LoopLag(seen.append)
        while not seen:
            await asyncio.sleep(PERIOD_S)
        seen.clear()
        time.sleep(STALL_S)
        while not seen:
            await asyncio.sleep(0)
        lag.stop()
        return seen

    seen = asyncio.run(stall())
    assert seen[0] == max(seen) >= STALL_S - PERIOD_S
    assert len(seen) >= STALL_S / PERIOD_S - 1 and min(seen) >= 0
    steps = [before - after for before, after in pairwise(seen)]
    assert all(abs(step - PERIOD_S) < 1e-6 for step in steps)
