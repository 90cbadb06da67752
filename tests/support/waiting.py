"""Waiting for what must come. Tests wait for events; a limit is there for what hangs alone."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 240.0
"""No machine is so busy that what a test waits for takes as long."""


def wait_until(holds: Callable[[], bool], interval_s: float = 0.01) -> None:
    """Raises AssertionError if the condition does not become true at all. To ask may itself take
    much, a process or a request: who waits long asks less often."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(interval_s)
        interval_s = min(1.5 * interval_s, 0.1)


async def until(holds: Callable[[], bool]) -> None:
    """The same on an event loop, which goes on meanwhile."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.001)
