"""How threads and event loops wait for a program: each leaves a callback, an event calls them all.

A waiting thread costs one lock, a waiting coroutine one future; a program that nobody waits for
costs nothing. Callbacks run on the connection's thread and never block.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable

Condition = Callable[[], bool]


class Waiters:
    """Who waits for something that `lock` guards."""

    __slots__ = ("_wakers", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def wake(self) -> None:
        """Have everybody look again; with the lock not held, after what they wait for changed."""
        with self.lock:
            if not self._wakers:
                return
            wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def wait(self, condition: Condition) -> None:
        """Until `condition`, which is asked with the lock held."""
        baton = threading.Lock()
        baton.acquire()
        while True:
            with self.lock:
                if condition():
                    return
                self._wakers.append(baton.release)
            baton.acquire()

    async def wait_async(self, condition: Condition) -> None:
        """The same for a coroutine."""
        loop = asyncio.get_running_loop()
        mailbox = _mailbox_of(loop)
        while True:
            future = loop.create_future()
            with self.lock:
                if condition():
                    return
                self._wakers.append(lambda future=future: mailbox.put(future))  # type: ignore[misc]
            await future


class _Mailbox:
    """Futures to be resolved on their loop, however many with one call into it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def put(self, future: asyncio.Future[None]) -> None:
        """On any thread. Nothing happens once the loop is closed."""
        self._ready.append(future)
        loop = self._loop()
        if self._is_scheduled or loop is None or loop.is_closed():
            return
        self._is_scheduled = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed in between: nobody waits any more
            self._ready.clear()

    def _deliver(self) -> None:
        self._is_scheduled = False  # first: who puts from here on schedules anew
        while self._ready:
            future = self._ready.popleft()
            if not future.done():
                future.set_result(None)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
    weakref.WeakKeyDictionary()
)


def _mailbox_of(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    found = _mailboxes.get(loop)
    if found is None:  # only this loop's thread asks for it
        found = _mailboxes[loop] = _Mailbox(loop)
    return found
