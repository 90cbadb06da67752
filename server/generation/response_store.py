"""Stored responses that later requests may continue: bounded in number, bytes and time."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import orjson

MAX_RESPONSES = 4096
MAX_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and its chat: its own messages and all before them."""

    owner: Hashable  # only its creator may see it
    body: dict[str, Any]
    input_items: list[Any]
    messages: list[dict[str, Any]]
    num_bytes: int
    expires_s: float


class ResponseStore:
    """Responses by id. Where there is no room the oldest of the owner that has most is dropped: of
    k owners none loses what it has while that is less than a k-th. A continued response shares its
    messages with its continuation but counts in full, so that the bound holds whichever is dropped.
    Thread-safe: large ones are put on another thread than the event loop's.
    """

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl_s`: how long a response is stored after its creation."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self._lock = threading.RLock()
        self._num_of: Counter[Hashable] = Counter()  # responses, by owner
        self._bytes_of: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_bytes(self) -> int:
        """Of all responses."""
        return self._bytes_of.total()

    def put(
        self,
        owner: Hashable,
        body: dict[str, Any],
        input_items: list[Any],
        messages: list[dict[str, Any]],
    ) -> None:
        """Store a response, unless it alone is too large."""
        num_bytes = len(orjson.dumps([body, input_items, messages]))
        if num_bytes > MAX_BYTES:
            return
        expires_s = self._clock() + self._ttl_s
        kept = StoredResponse(owner, body, input_items, messages, num_bytes, expires_s)
        with self._lock:
            self._by_id[body["id"]] = kept
            self._num_of[owner] += 1
            self._bytes_of[owner] += num_bytes
            self._forget_old()

    def get(self, owner: Hashable, response_id: str) -> StoredResponse | None:
        """None where there is none (any more), or it belongs to another owner."""
        with self._lock:
            self._forget_old()
            kept = self._by_id.get(response_id)
        return kept if kept is not None and kept.owner == owner else None

    def remove(self, owner: Hashable, response_id: str) -> bool:
        """Remove it; returns whether there was one."""
        with self._lock:
            if self.get(owner, response_id) is None:
                return False
            self._drop(response_id)
            return True

    def _forget_old(self) -> None:
        now = self._clock()
        while self._by_id and next(iter(self._by_id.values())).expires_s <= now:
            self._drop(next(iter(self._by_id)))
        while len(self._by_id) > MAX_RESPONSES:
            self._drop_oldest_of(self._num_of)
        while self.num_bytes > MAX_BYTES:
            self._drop_oldest_of(self._bytes_of)

    def _drop_oldest_of(self, held: Counter[Hashable]) -> None:
        """Of the owner that has most."""
        most = max(held, key=held.__getitem__)
        self._drop(next(key for key, kept in self._by_id.items() if kept.owner == most))

    def _drop(self, response_id: str) -> None:
        kept = self._by_id.pop(response_id)
        for held, num in ((self._num_of, 1), (self._bytes_of, kept.num_bytes)):
            held[kept.owner] -= num
            if not held[kept.owner]:
                del held[kept.owner]
