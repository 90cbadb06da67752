"""The waiting requests, and in which order they are offered for admission.

    preempted, the last one first   ->   those that are due (aging)   ->   by the policy's key

Cost: add and remove O(1); a request offered O(log n); a round `num_refreshed` keys and at most as
many checks, however many wait. SGLang matches all waiting requests before each batch and therefore
falls back to first come, first served past 128; here a key is computed when the request arrives, a
few of the oldest keys are refreshed each round, and the best one is checked again before it is
offered, since what it matched may have been evicted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ..request import Request
from .policy import Policy, Surroundings

MAX_OVERTAKES = 128  # of a request that found an empty queue; see docs/scheduler.md for the price

_Item = tuple[float, int, Request]  # key, arrival number (so requests are never compared)


class _Arrival(NamedTuple):
    """When a request came, and how many must have left the queue until nobody may overtake it."""

    number: int
    due_at: int


class WaitingQueue:
    """Owns the order of the requests that wait.

    Invariant (aging): under a policy with aging, at most `max_overtakes + n` requests that
    arrived later are admitted for the first time before a waiting one, whatever arrives; n is the
    longest queue that it or anyone before it has found. So where first come, first served lets it
    wait for n admissions, it waits for 2 n + `max_overtakes` at most. A request is due when as many
    have left the queue as arrived before it, and its overtakes more; due ones go in order of
    arrival, at most one becomes due for each that leaves, and nobody overtakes them.
    """

    def __init__(
        self, policy: Policy, around: Surroundings, max_overtakes: int | None = MAX_OVERTAKES
    ) -> None:
        """`max_overtakes` None: no aging."""
        self._around = around
        self._max_overtakes = max_overtakes
        self._policy = policy
        self._preempted: deque[Request] = deque()
        self._arrivals: OrderedDict[Request, _Arrival] = OrderedDict()  # all others
        self._unranked: deque[Request] = deque()  # and some that have left
        self._to_refresh: deque[Request] = deque()  # the ranked, and some that have left
        self._items: dict[Request, _Item] = {}  # of the ranked: its valid entry in the heap
        self._heap: list[_Item] = []
        self._num_arrived = 0
        self._num_left = 0
        self._last_due_at = 0

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrivals)

    def __contains__(self, request: Request) -> bool:
        return request in self._arrivals or request in self._preempted

    def __iter__(self) -> Iterator[Request]:
        """The preempted, then the others in order of arrival."""
        yield from self._preempted
        yield from self._arrivals

    @property
    def policy(self) -> Policy:
        """How the waiting are ranked; setting it ranks them anew."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._policy = policy
        self._heap.clear()
        self._items.clear()
        self._to_refresh.clear()
        self._unranked = deque(self._arrivals)

    def add(self, request: Request) -> None:
        """A request has arrived."""
        allowed = (self._max_overtakes or 0) + len(self._arrivals)
        due_at = max(self._num_arrived + allowed, self._last_due_at + 1)
        self._arrivals[request] = _Arrival(self._num_arrived, due_at)
        self._num_arrived += 1
        self._last_due_at = due_at
        self._unranked.append(request)

    def put_back(self, request: Request) -> None:
        """A request was preempted: it is the first to run again."""
        self._preempted.appendleft(request)

    def remove(self, request: Request) -> None:
        """A request is admitted or has ended."""
        if self._arrivals.pop(request, None) is None:
            self._preempted.remove(request)
            return
        self._items.pop(request, None)
        self._num_left += 1

    def is_due(self, request: Request) -> bool:
        """Whether aging lets nobody overtake this request any more."""
        if self._max_overtakes is None or not self._policy.has_aging:
            return False
        arrival = self._arrivals.get(request)
        return arrival is not None and self._num_left >= arrival.due_at

    def candidates(self) -> Generator[Request, None, None]:
        """One round: requests to admit, best first.

        The caller removes what it admits before it asks for the next; the others keep their places.
        A due request that is passed over ends the round.
        """
        yield from tuple(self._preempted)
        self._refresh()
        offered: list[_Item] = []
        try:
            while (request := self._due() or self._best(offered)) is not None:
                yield request
                if self.is_due(request):
                    return
        finally:
            for item in offered:
                if self._items.get(item[2]) is item:
                    heappush(self._heap, item)

    def _due(self) -> Request | None:
        """The oldest request, if it is due."""
        oldest = next(iter(self._arrivals), None)
        return oldest if oldest is not None and self.is_due(oldest) else None

    def _best(self, offered: list[_Item]) -> Request | None:
        """The request with the smallest key that was not offered in this round."""
        num_checks = self._policy.num_refreshed
        while self._heap or self._rank_window():
            item = heappop(self._heap)
            if self._items.get(item[2]) is not item:
                continue
            if num_checks:
                num_checks -= 1
                (key,) = self._policy.rank((item[2],), self._around)
                if key > item[0]:
                    self._set_key(item[2], key)
                    continue
            offered.append(item)
            return item[2]
        return None

    def _rank_window(self) -> bool:
        """Rank the next window of requests; whether there were any."""
        requests: list[Request] = []
        while self._unranked and len(requests) != self._policy.window:
            request = self._unranked.popleft()
            if request in self._arrivals:
                requests.append(request)
        self._rank(requests)
        if self._policy.num_refreshed:
            self._to_refresh.extend(requests)
        return bool(requests)

    def _refresh(self) -> None:
        """Rank what has arrived, and again those whose keys are oldest."""
        if self._policy.window is None:
            self._rank_window()
        requests: list[Request] = []
        while self._to_refresh and len(requests) < self._policy.num_refreshed:
            request = self._to_refresh.popleft()
            if request in self._arrivals:
                requests.append(request)
        self._rank(requests)
        self._to_refresh.extend(requests)
        if len(self._heap) > 2 * len(self._items) + 64:  # most entries are no longer valid
            self._heap = list(self._items.values())
            heapify(self._heap)

    def _rank(self, requests: Sequence[Request]) -> None:
        for request, key in zip(requests, self._policy.rank(requests, self._around)):
            item = self._items.get(request)
            if item is None or item[0] != key:
                self._set_key(request, key)

    def _set_key(self, request: Request, key: float) -> None:
        item = (key, self._arrivals[request].number, request)
        self._items[request] = item
        heappush(self._heap, item)
