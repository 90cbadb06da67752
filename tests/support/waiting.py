"""Waiting for what must come. Tests wait for events; a limit is there for what hangs alone."""

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

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


def stop(pid: int) -> None:
    """Stop a child, all its threads: one may run on for a while after the signal."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def ready(sources: Sequence[Any], limit_s: float) -> list[Any]:
    """Those of the sources, descriptors or what has one, that can be read, once any can. Of
    descriptors of any number, which `select.select` is not for."""
    by_descriptor = {s if isinstance(s, int) else s.fileno(): s for s in sources}
    poll = select.poll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[found] for found, _ in poll.poll(limit_s * 1000)]


async def until(holds: Callable[[], bool]) -> None:
    """The same on an event loop, which goes on meanwhile."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.001)
