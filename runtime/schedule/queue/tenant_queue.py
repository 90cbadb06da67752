"""One tenant's waiting requests, in the order of a policy, with aging.

    preempted, the last one first   ->   those that are due (aging)   ->   by the policy's key

A request that the working set has no room for (`working_set.py`) is parked: it keeps its key, those
of programs that have begun before those of new ones, and once one of the parked is refused in a
round the others are not offered in that round. So whatever waits for the working set costs
nothing. Nor does what waits for its adapter's slot (`adapter_slots.py`): each adapter's
requests have a heap of their own, and a round looks only into those that it may take from.

When a call is admitted, its program's others come next: children of a fork start together on the
prefix that they share, which is computed once and read once for all of them (tree attention).

Cost: add and remove O(1); a request offered O(log n); a round `num_refreshed` keys and at most as
many checks, however many wait. SGLang matches all waiting requests before each batch and therefore
falls back to first come, first served past 128; here a key is computed when the request arrives, a
few of the oldest keys are refreshed each round, and the best one is checked again before it is
offered, since what it matched may have been evicted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import NamedTuple

from ..program_record import ProgramRecord
from ..request import Request
from .adapter_slots import AdapterAdmission, Group, group_of
from .policy import Key, Policy, PolicyContext

_Item = tuple[Key, int, Request]  # key, arrival number (so requests are never compared)


class _Arrival(NamedTuple):
    """When a request came, and how many must have left the queue until nobody may overtake it."""

    number: int
    due_at: int


class TenantQueue:
    """Owns the order of one tenant's requests.

    Invariant (aging): under a policy with aging, at most `max_overtakes + n` requests that
    arrived later are admitted for the first time before a waiting one, whatever arrives; n is the
    longest queue that it or anyone before it has found. So where first come, first served lets it
    wait for n admissions, it waits for 2 n + `max_overtakes` at most. A request is due when as many
    have left the queue as arrived before it, and its overtakes more; due ones go in order of
    arrival, at most one becomes due for each that leaves, and nobody overtakes them. A preempted
    request comes before all that never ran.
    """

    def __init__(
        self,
        policy: Policy,
        around: PolicyContext,
        max_overtakes: int | None,
        adapters: AdapterAdmission,
    ) -> None:
        """`max_overtakes` None: no aging."""
        self._around = around
        self._max_overtakes = max_overtakes
        self._adapters = adapters
        self._policy = policy
        self._arrivals: OrderedDict[Request, _Arrival] = OrderedDict()
        self._preempted: OrderedDict[Request, None] = OrderedDict()  # the last one last
        self._to_resume: deque[Request] = deque()  # of these, to be offered in this round
        self._unranked: deque[Request] = deque()  # and some that have left
        self._to_refresh: deque[Request] = deque()  # the ranked, and some that have left
        self._items: dict[Request, _Item] = {}  # of the ranked: its valid entry in a heap
        self._heaps: dict[Group, list[_Item]] = {}
        # In a round: of each heap that it may take from an entry that is not behind its first.
        self._heads: list[tuple[_Item, Group]] = []
        self._num_stale = 0  # entries of heaps that are no longer valid, at most
        self._num_of: dict[Group, int] = {}  # that are here and not parked
        self._parked: set[Request] = set()
        self._parked_heap: list[_Item] = []
        self._num_arrived = 0
        self._num_left = 0
        self._last_due_at = 0
        self._offered: dict[Request, _Item] = {}  # in this round
        self._siblings: dict[ProgramRecord, dict[Request, None]] = {}  # those that are here
        self._gang: deque[Request] = deque()  # to be offered next
        self._num_checks = 0  # that this round may still make

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrivals)

    def __contains__(self, request: Request) -> bool:
        return request in self._arrivals or request in self._preempted

    def __iter__(self) -> Iterator[Request]:
        """The preempted, then the others in order of arrival."""
        yield from reversed(self._preempted)
        yield from self._arrivals

    def add(self, request: Request) -> None:
        """A request has arrived."""
        allowed = (self._max_overtakes or 0) + len(self._arrivals)
        due_at = max(self._num_arrived + allowed, self._last_due_at + 1)
        self._arrivals[request] = _Arrival(self._num_arrived, due_at)
        self._num_arrived += 1
        self._last_due_at = due_at
        self._unranked.append(request)
        self._count(request, 1)
        if request.program is not None and self._policy.has_gangs:
            self._siblings.setdefault(request.program, {})[request] = None

    def put_back(self, request: Request) -> None:
        """A request was preempted: it is the tenant's first to run again."""
        self._preempted[request] = None

    def is_preempted(self, request: Request) -> bool:
        """Whether it has run already, and lost its pages to others."""
        return request in self._preempted

    def remove(self, request: Request) -> None:
        """A request is admitted or has ended."""
        if request in self._preempted:
            del self._preempted[request]
            return
        del self._arrivals[request]
        self._num_stale += self._items.pop(request, None) is not None
        if request in self._parked:
            self._parked.remove(request)
        else:
            self._count(request, -1)
        self._num_left += 1
        if request.program in self._siblings:
            self._leave_siblings(request)

    def park(self, request: Request) -> None:
        """An offered request has to wait until the working set has room for it."""
        if request not in self._parked:
            key = self._items[request][0]
            self._parked.add(request)
            self._count(request, -1)
            self._set_key(request, self._key(request, key))

    def is_parked(self, request: Request) -> bool:
        """Whether it waits for the working set."""
        return request in self._parked

    def has_open(self, *, also_parked: bool) -> bool:
        """Whether a round that begins now would offer anything."""
        if self._preempted or (also_parked and self._parked):
            return True
        if any(True for _ in self._adapters.among(self._num_of)):
            return True
        return any(self.is_due(oldest) for oldest in islice(self._arrivals, 1))

    def is_due(self, request: Request) -> bool:
        """Whether aging lets nobody overtake this request any more."""
        if self._max_overtakes is None or not self._policy.has_aging:
            return False
        arrival = self._arrivals.get(request)
        return arrival is not None and self._num_left >= arrival.due_at

    # --- a round ----------------------------------------------------------------------------------

    def begin_round(self, num_refreshed: int) -> None:
        """Rank what has arrived, and again the `num_refreshed` whose keys are oldest."""
        self._to_resume.extend(reversed(self._preempted))
        if self._policy.window is None:
            self._rank_window()
        requests: list[Request] = []
        while self._to_refresh and len(requests) < num_refreshed:
            request = self._to_refresh.popleft()
            if request in self._arrivals:
                requests.append(request)
        self._rank(requests)
        self._to_refresh.extend(requests)
        self._num_checks = num_refreshed
        if self._num_stale > len(self._items) + 64:
            self._compact()
        open_heaps = ((self._heaps[group], group) for group in self._adapters.among(self._heaps))
        self._heads = [(heap[0], group) for heap, group in open_heaps if heap]
        heapify(self._heads)

    def best(self, *, also_parked: bool = True) -> tuple[Key, Request] | None:
        """The next request to offer in this round, with its key: preempted, due, then with the
        smallest key that was not offered in this round."""
        while self._to_resume:
            request = self._to_resume.popleft()
            if request in self._preempted:
                return (), request
        oldest = next(iter(self._arrivals), None)
        if oldest is not None and self.is_due(oldest):
            return (), oldest
        while self._gang:
            request = self._gang.popleft()
            if request in self._items and self._is_open(request):
                self._offered[request] = self._items[request]
                return self._items[request][0], request
        while (item := self._pop(also_parked)) or self._rank_window():
            if item is None:
                continue
            key, _, request = item
            if self._num_checks:
                self._num_checks -= 1
                now = self._key(request, self._policy.rank((request,), self._around)[0])
                if now > key:
                    self._set_key(request, now)
                    continue
            self._offered[request] = item
            return (key[1:] if request in self._parked else key), request
        return None

    def end_round(self) -> None:
        """What was offered and is still here keeps its place."""
        for request, item in self._offered.items():
            if self._items.get(request) is item:
                heappush(self._heap_of(request), item)
        self._to_resume.clear()
        self._offered.clear()
        self._gang.clear()
        self._heads.clear()

    def _pop(self, also_parked: bool) -> _Item | None:
        """The smallest valid entry of those that the round may take; a parked one only where it is
        smaller than the others."""
        item, parked = self._top_of_heaps(), None
        if also_parked:
            parked = self._top_of_parked()
        if parked is not None and (item is None or parked[0][1:] < item[0]):
            return heappop(self._parked_heap)
        return None if item is None else heappop(self._heap_of(item[2]))

    def _top_of_heaps(self) -> _Item | None:
        while self._heads:
            head, group = self._heads[0]
            item = self._top(self._heaps[group]) if self._adapters.admits(group) else None
            if item is head:
                return item
            if item is None:
                heappop(self._heads)
            else:
                heapreplace(self._heads, (item, group))
        return None

    def _top_of_parked(self) -> _Item | None:
        """Those that lack a slot leave: they wait for that first, and are not asked for again."""
        while item := self._top(self._parked_heap):
            request = item[2]
            if self._adapters.admits(group_of(request)):
                return item
            self._parked.remove(request)
            self._count(request, 1)
            self._set_key(request, item[0][1:])
        return None

    def _leave_siblings(self, request: Request) -> None:
        """Those that stay are offered next, if a round is going on that offered the request."""
        program = request.program
        assert program is not None
        siblings = self._siblings[program]
        del siblings[request]
        if not siblings:
            del self._siblings[program]
        elif request in self._offered and not self._gang:
            self._gang.extend(siblings)

    def _is_open(self, request: Request) -> bool:
        """Whether it is here, ranked, not parked, not yet offered in this round, and has a slot."""
        is_new = request in self._items and request not in self._offered
        has_slot = self._adapters.admits(group_of(request))
        return is_new and has_slot and request not in self._parked

    def _top(self, heap: list[_Item]) -> _Item | None:
        while heap and (
            self._items.get(heap[0][2]) is not heap[0] or self._offered.get(heap[0][2]) is heap[0]
        ):
            heappop(heap)
        return heap[0] if heap else None

    # --- keys -------------------------------------------------------------------------------------

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

    def _rank(self, requests: Sequence[Request]) -> None:
        for request, rank in zip(requests, self._policy.rank(requests, self._around)):
            key = self._key(request, rank)
            item = self._items.get(request)
            if item is None or item[0] != key:
                self._set_key(request, key)

    def _key(self, request: Request, rank: Key) -> Key:
        """Of the parked, programs that have begun come first."""
        if request not in self._parked:
            return rank
        program = request.program
        return (program is None or not program.num_calls_started, *rank)

    def _set_key(self, request: Request, key: Key) -> None:
        item = (key, self._arrivals[request].number, request)
        self._num_stale += request in self._items
        self._items[request] = item
        heap = self._heap_of(request)
        heappush(heap, item)
        if heap[0] is item and heap is not self._parked_heap:
            heappush(self._heads, (item, group_of(request)))

    def _heap_of(self, request: Request) -> list[_Item]:
        if request in self._parked:
            return self._parked_heap
        group = group_of(request)
        heap = self._heaps.get(group)
        if heap is None:
            heap = self._heaps[group] = []
        return heap

    def _compact(self) -> None:
        """Most entries may be no longer valid, and some heaps empty."""
        self._num_stale = 0
        self._heaps.clear()
        self._parked_heap.clear()
        for request, item in self._items.items():
            self._heap_of(request).append(item)
        for heap in (*self._heaps.values(), self._parked_heap):
            heapify(heap)

    def _count(self, request: Request, change: int) -> None:
        """One more or less of its group is here and not parked."""
        group = group_of(request)
        num = self._num_of.get(group, 0) + change
        if num:
            self._num_of[group] = num
        else:
            del self._num_of[group]
