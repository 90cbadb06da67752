"""How threads and event loops wait for a program: each leaves a callback, an event calls them all.

A waiting thread costs one lock, a waiting coroutine one future; a program without waiters costs
nothing. Callbacks run on the connection's thread and never block.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

Condition = Callable[[], bool]


class Waiters:
    """The waiters for one condition. The changer first changes it, then calls `wake`; a waiter
    first leaves its callback, then checks: so one of the two always sees the other."""

    __slots__ = ("_wakers", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def wake(self) -> None:
        """Make all waiters check again, after the condition has changed."""
        if not self._wakers:
            return
        with self.lock:
            wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def wait(self, condition: Condition) -> None:
        """Block until `condition`."""
        while not condition():
            baton = threading.Lock()
            baton.acquire()
            self._leave(baton.release)
            if condition():
                return
            baton.acquire()

    async def wait_async(self, condition: Condition) -> None:
        """The same for a coroutine."""
        if condition():
            return
        loop = asyncio.get_running_loop()
        mailbox = _mailbox_of(loop)
        while not condition():
            future = loop.create_future()
            self._leave(partial(mailbox.put, future))
            if condition():
                return
            await future

    def _leave(self, waker: Callable[[], None]) -> None:
        with self.lock:
            self._wakers.append(waker)


class _Mailbox:
    """Resolves futures on their loop, many with one call into it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._ready: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    def put(self, future: asyncio.Future[None]) -> None:
        """On any thread. No effect once the loop is closed."""
        self._ready.append(future)
        loop = self._loop()
        if self._is_scheduled or loop is None or loop.is_closed():
            return
        self._is_scheduled = True
        try:
            loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # closed in between: no waiters remain
            self._ready.clear()

    def _deliver(self) -> None:
        self._is_scheduled = False  # first: a later put schedules again
        while self._ready:
            future = self._ready.popleft()
            if not future.done():
                future.set_result(None)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Mailbox] = (
    weakref.WeakKeyDictionary()
)


def _mailbox_of(loop: asyncio.AbstractEventLoop) -> _Mailbox:
    found = _mailboxes.get(loop)
    if found is None:  # only this loop's thread looks it up
        found = _mailboxes[loop] = _Mailbox(loop)
    return found
