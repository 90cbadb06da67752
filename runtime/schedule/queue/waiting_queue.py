"""The waiting requests, and in which order they are offered for admission.

    preempted, the last one first   ->   tenant by tenant (fairness.py)   ->   the tenant's queue

Under a policy that is not fair all requests stand in one queue (`tenant_queue.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Hashable, Iterator
from heapq import heappop, heappush

from ..request import Request
from .adapter_slots import AdapterAdmission, AdapterSlots, group_of
from .fairness import TenantShares, tenant_of
from .policy import Key, Policy, PolicyContext
from .tenant_queue import TenantQueue

MAX_QUEUES = 64  # of equal shares whose best requests are compared with each other (guess)
# Of a request that found an empty queue; docs/decisions/0011-aging.md has the price.
MAX_OVERTAKES = 128

# Of a tenant's queue: the tenant's place, its best request's key, the queue's number.
_Head = tuple[int, Key, int, Hashable, Request]


class WaitingQueue:
    """Owns the order of the requests that wait.

    Invariant: a preempted request comes before all that never ran; within a tenant the bound on
    overtakes is TenantQueue's; between tenants it is TenantShares'.
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
        self._preempted: OrderedDict[Request, None] = OrderedDict()  # the last one last
        self._queues: dict[Hashable, TenantQueue] = {}
        self._has_parked = False  # in this round
        self._adapters = AdapterAdmission(adapters)

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._queues)

    def __contains__(self, request: Request) -> bool:
        return request in self._preempted or request in self._queues.get(self._tenant(request), ())

    def __iter__(self) -> Iterator[Request]:
        """The preempted, then the others, of each tenant in order of arrival."""
        yield from reversed(self._preempted)
        for queue in self._queues.values():
            yield from queue

    @property
    def policy(self) -> Policy:
        """How the waiting are ranked; setting it ranks them anew, as if they had just come."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        waiting = sorted(
            (request for queue in self._queues.values() for request in queue), key=lambda r: r.id
        )
        self._policy = policy
        self._queues.clear()
        for request in waiting:
            self.add(request)

    def add(self, request: Request) -> None:
        """A request has arrived."""
        tenant = self._tenant(request)
        if tenant not in self._queues:
            self._queues[tenant] = TenantQueue(
                self._policy, self._around, self._max_overtakes, self._adapters
            )
        self._queues[tenant].add(request)

    def put_back(self, request: Request) -> None:
        """A request was preempted: it is the first to run again."""
        self._preempted[request] = None

    def remove(self, request: Request) -> None:
        """A request is admitted or has ended."""
        if request in self._preempted:
            del self._preempted[request]
            return
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
        return request in self._preempted

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

    def candidates(self) -> Generator[Request, None, None]:
        """One round: requests to admit, best first.

        The caller removes what it admits before it asks for the next; the others keep their places.
        A due request that is passed over ends the round of its tenant. Of the others those that
        would wait for their adapters' slots are not offered.
        """
        self._has_parked = False
        self._adapters.begin_round()
        yield from tuple(reversed(self._preempted))
        opened: list[TenantQueue] = []
        try:
            yield from self._by_share(opened)
        finally:
            for queue in opened:
                queue.end_round()

    def _by_share(self, opened: list[TenantQueue]) -> Iterator[Request]:
        """Each tenant's best, that of the tenant with the least service first, until all queues are
        through. Queues are opened as they are needed: a round costs the same with ten tenants and
        with thousands, but for putting these in order."""
        num_refreshed = -(-self._policy.num_refreshed // max(1, min(len(self._queues), MAX_QUEUES)))
        queues = dict(self._queues)
        place = self._shares.place
        rest = sorted(((place(tenant), i, tenant) for i, tenant in enumerate(queues)), reverse=True)
        heads: list[_Head] = []
        given: dict[Hashable, int] = dict.fromkeys(queues, 0)  # tokens, in this round
        while heads or rest:
            if rest and (not heads or rest[-1][0] < heads[0][0]):
                for _ in range(min(len(rest), MAX_QUEUES)):
                    _, number, tenant = rest.pop()
                    if not queues[tenant].has_open(also_parked=not self._has_parked):
                        continue
                    queues[tenant].begin_round(num_refreshed)
                    opened.append(queues[tenant])
                    self._push_head(heads, number, tenant, queues[tenant], 0)
                continue
            _, _, number, tenant, request = heappop(heads)
            queue = queues[tenant]
            is_due = queue.is_due(request)
            if is_due or not (self._has_parked and queue.is_parked(request)):
                yield request
                if request not in queue:
                    given[tenant] += request.num_tokens
                elif is_due:
                    continue
            self._push_head(heads, number, tenant, queue, given[tenant])

    def _push_head(
        self, heads: list[_Head], number: int, tenant: Hashable, queue: TenantQueue, num_given: int
    ) -> None:
        best = queue.best(also_parked=not self._has_parked)
        if best is not None:
            share = self._shares.place(tenant, num_given)
            heappush(heads, (share, best[0], number, tenant, best[1]))

    def _tenant(self, request: Request) -> Hashable:
        return tenant_of(request) if self._policy.is_fair else None
