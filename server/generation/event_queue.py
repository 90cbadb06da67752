"""From the connection's I/O thread to an asyncio loop: many events, one wake.

A loop is woken by a byte into a pipe, a system call that costs more than what an event says. So
events wait in a queue and the loop is woken once for all that come before it looks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

Delivery = tuple[Callable[[int, str, object], None], int, str, object]


class EventQueue:
    """Calls made on other threads, carried out on `loop` in their order. Lifetime: the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._deliveries: deque[Delivery] = deque()
        self._is_woken = False

    def post(
        self, take: Callable[[int, str, object], None], index: int, kind: str, payload: object
    ) -> None:
        """Have the loop call `take(index, kind, payload)`; on any thread."""
        self._deliveries.append((take, index, kind, payload))
        if not self._is_woken:
            self._is_woken = True
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # first: what comes from here on wakes the loop again
        while self._deliveries:
            take, index, kind, payload = self._deliveries.popleft()
            try:
                take(index, kind, payload)
            except Exception:  # a fault of ours must not keep from others what is theirs
                log.exception("a %s could not be delivered", kind)
