"""A queue between threads whose owners take turns (round robin), so that nobody waits for all that
another has put in."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class TurnQueue(Generic[T]):
    """Owns what waits, by owner, the one whose turn it is first.

    Invariant: an owner with something in it has one turn in each round. Lifetime: until `close`.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, deque[T]] = OrderedDict()
        self._changed = threading.Condition()
        self._is_closed = False

    def __len__(self) -> int:
        with self._changed:
            return sum(map(len, self._waiting.values()))

    def put(self, item: T, owner: Hashable) -> None:
        """Add it behind what its owner has in it."""
        with self._changed:
            self._waiting.setdefault(owner, deque()).append(item)
            self._changed.notify()

    def take(self) -> T | None:
        """The next owner's first item, waiting for one; None once closed."""
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return None
            owner, items = self._waiting.popitem(last=False)
            item = items.popleft()
            if items:
                self._waiting[owner] = items
            return item

    def close(self) -> None:
        """Give nothing more; what waits stays where it is."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
