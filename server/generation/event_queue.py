"""Passes events from the connection's I/O thread to an asyncio loop, with one wake-up for many.

Waking a loop writes a byte into a pipe, a system call that costs more than handling an event. So
events wait in a queue and the loop is woken once for all that arrive before it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Delivery = tuple[Callable[[int, str, object], None], int, str, object]


class EventQueue:
    """Calls made on other threads, run on `loop` in their order. Lifetime: the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deliveries: deque[Delivery] = deque()
        self._is_woken = False

    def post(
        self, take: Callable[[int, str, object], None], index: int, kind: str, payload: object
    ) -> None:
        """Make the loop call `take(index, kind, payload)`; callable on any thread."""
        self._deliveries.append((take, index, kind, payload))
        if not self._is_woken:
            self._is_woken = True
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: later events wake the loop again
        while self._deliveries:
            take, index, kind, payload = self._deliveries.popleft()
            try:
                take(index, kind, payload)
            except Exception:  # a bug in one callback must not cost the others their events
                log.exception("a %s could not be delivered", kind)
