"""The waiting requests, and in which order they are offered for admission.

    the tenant that others give way to   ->   tenant by tenant (fairness.py)   ->   its queue

Under a policy that is not fair all requests stand in one queue (`tenant_queue.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable, Iterator
from heapq import heappop, heappush

from ..request import Request
from .adapter_slots import AdapterAdmission, AdapterSlots, group_of
from .fairness import TenantShares, tenant_of
from .policy import Key, Policy, PolicyContext
from .tenant_queue import TenantQueue

MAX_QUEUES = 64  # of equal shares whose best requests are compared with each other (guess)
# Of a request that found an empty queue; docs/decisions/0011-aging.md has the price.
MAX_OVERTAKES = 128
NOBODY = object()  # a tenant that nobody is

# Of a tenant's queue: the tenant's place, its best request's key, the tenant's time, the queue's
# number.
_Head = tuple[int, Key, float, int, Hashable, Request]


class WaitingQueue:
    """Owns the order of the requests that wait.

    Invariant: within a tenant the order and the bound on overtakes are TenantQueue's; between
    tenants it is TenantShares'.
    """

    def __init__(
        self,
        policy: Policy,
        around: PolicyContext,
        max_overtakes: int | None = MAX_OVERTAKES,
        shares: TenantShares | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`max_overtakes` None: no aging. `adapters`: needed where requests have any."""
        self._around = around
        self._max_overtakes = max_overtakes
        self._policy = policy
        self._shares = shares or TenantShares()
        self._queues: dict[Hashable, TenantQueue] = {}
        self._has_parked = False  # in this round
        self._adapters = AdapterAdmission(adapters)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, request: Request) -> bool:
        return request in self._queues.get(self._tenant(request), ())

    def __iter__(self) -> Iterator[Request]:
        """Of each tenant the preempted, then the others in order of arrival."""
        for queue in self._queues.values():
            yield from queue

    @property
    def policy(self) -> Policy:
        """How the waiting are ranked; setting it ranks them anew, as if they had just come."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        preempted = [r for r in self if self.is_preempted(r)]
        waiting = sorted((r for r in self if not self.is_preempted(r)), key=lambda r: r.id)
        self._policy = policy
        self._queues.clear()
        for request in waiting:
            self.add(request)
        for request in reversed(preempted):
            self.put_back(request)

    def add(self, request: Request) -> None:
        """A request has arrived."""
        self._queue_of(request).add(request)

    def put_back(self, request: Request) -> None:
        """A request was preempted: it is the first of its tenant's to run again."""
        self._queue_of(request).put_back(request)

    def remove(self, request: Request) -> None:
        """A request is admitted or has ended."""
        tenant = self._tenant(request)
        self._queues[tenant].remove(request)
        if not len(self._queues[tenant]):
            del self._queues[tenant]

    def is_due(self, request: Request) -> bool:
        """Whether aging lets nobody overtake this request any more."""
        queue = self._queues.get(self._tenant(request))
        return queue is not None and queue.is_due(request)

    def is_preempted(self, request: Request) -> bool:
        """Whether it has run already, and lost its pages to others."""
        queue = self._queues.get(self._tenant(request))
        return queue is not None and queue.is_preempted(request)

    def is_parked(self, request: Request) -> bool:
        """Whether it waits for the working set."""
        queue = self._queues.get(self._tenant(request))
        return queue is not None and queue.is_parked(request)

    def park(self, request: Request) -> None:
        """The working set has no room for an offered request, and so none for others that are
        parked: none of them is offered again in this round."""
        self._queues[self._tenant(request)].park(request)
        self._has_parked = True

    def has_slot(self, request: Request) -> bool:
        """Whether an offered request's adapter is on the device, or may come there. Where one that
        nobody may overtake has to wait for a slot, no other is offered any in this round."""
        if self._adapters.admits(group_of(request)):
            return True
        if self.is_due(request) or self.is_preempted(request):
            self._adapters.hold()
        return False

    def num_of(self, tenant: Hashable) -> int:
        """How many of a tenant's wait."""
        return len(self._queues.get(tenant, ()))

    @property
    def tenants(self) -> Collection[Hashable]:
        """Those that have requests here; one for all under a policy that is not fair."""
        return self._queues.keys()

    def candidates(self, first: Hashable = NOBODY) -> Generator[Request, None, None]:
        """One round: requests to admit, best first; that of tenant `first` before all others.

        The caller removes what it admits before it asks for the next; the others keep their places.
        A due request that is passed over ends the round of its tenant. Of the others those that
        would wait for their adapters' slots are not offered.
        """
        self._has_parked = False
        self._adapters.begin_round()
        opened: list[TenantQueue] = []
        try:
            yield from self._by_share(opened, first)
        finally:
            for queue in opened:
                queue.end_round()

    def _by_share(self, opened: list[TenantQueue], first: Hashable) -> Iterator[Request]:
        """Each tenant's best, that of the tenant with the least service first, until all queues are
        through: by quanta, then by the policy, and among equals by the service itself. Queues are
        opened as they are needed: a round costs the same with ten tenants and with thousands, but
        for putting these in order."""
        num_refreshed = -(-self._policy.num_refreshed // max(1, min(len(self._queues), MAX_QUEUES)))
        queues = dict(self._queues)

        def place(tenant: Hashable) -> int:
            if tenant == first and not given[tenant]:
                return -1
            return self._shares.place(tenant, given[tenant])

        def time(tenant: Hashable) -> float:
            return self._shares.time(tenant, given[tenant])

        def push(number: int, tenant: Hashable) -> None:
            best = queues[tenant].best(also_parked=not self._has_parked)
            if best is not None:
                heappush(heads, (place(tenant), best[0], time(tenant), number, tenant, best[1]))

        given: dict[Hashable, int] = dict.fromkeys(queues, 0)  # tokens, in this round
        rest = sorted(
            ((place(tenant), time(tenant), i, tenant) for i, tenant in enumerate(queues)),
            reverse=True,
        )
        heads: list[_Head] = []
        while heads or rest:
            if rest and (not heads or rest[-1][0] < heads[0][0]):
                for _ in range(min(len(rest), MAX_QUEUES)):
                    _, _, number, tenant = rest.pop()
                    if not queues[tenant].has_open(also_parked=not self._has_parked):
                        continue
                    queues[tenant].begin_round(num_refreshed)
                    opened.append(queues[tenant])
                    push(number, tenant)
                continue
            _, _, _, number, tenant, request = heappop(heads)
            queue = queues[tenant]
            is_due = queue.is_due(request)
            if is_due or not (self._has_parked and queue.is_parked(request)):
                yield request
                if request not in queue:
                    given[tenant] += request.num_tokens
                elif is_due:
                    continue
            push(number, tenant)

    def _queue_of(self, request: Request) -> TenantQueue:
        tenant = self._tenant(request)
        if tenant not in self._queues:
            self._queues[tenant] = TenantQueue(
                self._policy, self._around, self._max_overtakes, self._adapters
            )
        return self._queues[tenant]

    def _tenant(self, request: Request) -> Hashable:
        return tenant_of(request) if self._policy.is_fair else None
