"""Stored responses that later requests may continue: bounded in number, bytes and time."""

from __future__ import annotations

import time
from collections import OrderedDict
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
    """Responses by id; the oldest is dropped first. A continued response shares its messages with
    its continuation but counts in full, so that the bound holds whichever is dropped."""

    def __init__(self, ttl_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`ttl_s`: how long a response is stored after its creation."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._by_id: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_id)

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
        self._by_id[body["id"]] = kept
        self.num_bytes += num_bytes
        self._forget_old()

    def get(self, owner: Hashable, response_id: str) -> StoredResponse | None:
        """None where there is none (any more), or it belongs to another owner."""
        self._forget_old()
        kept = self._by_id.get(response_id)
        return kept if kept is not None and kept.owner == owner else None

    def remove(self, owner: Hashable, response_id: str) -> bool:
        """Remove it; returns whether there was one."""
        if self.get(owner, response_id) is None:
            return False
        self.num_bytes -= self._by_id.pop(response_id).num_bytes
        return True

    def _forget_old(self) -> None:
        now = self._clock()
        while self._by_id:
            oldest = next(iter(self._by_id.values()))
            is_full = len(self._by_id) > MAX_RESPONSES or self.num_bytes > MAX_BYTES
            if not is_full and oldest.expires_s > now:
                return
            self._by_id.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
