"""The waiting requests, and in which order they are offered for admission.

    preempted, the last one first   ->   tenant by tenant (fairness.py)   ->   the tenant's line

Under a policy that is not fair all requests stand in one line (`line.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Hashable, Iterator
from heapq import heappop, heappush

from ..lora.slots import AdapterSlots
from ..request import Request
from .adapter_door import AdapterDoor, group_of
from .fairness import TenantShares, tenant_of
from .line import Line
from .policy import Key, Policy, Surroundings

MAX_LINES = 64  # of equal shares whose best requests are compared with each other (guess)
# Of a request that found an empty line; docs/decisions/0011-aging.md has the price.
MAX_OVERTAKES = 128

_Head = tuple[int, Key, int, Hashable, Request]  # of a line: tenant's place, key, line's number


class WaitingQueue:
    """Owns the order of the requests that wait.

    Invariant: a preempted request comes before all that never ran; within a tenant the bound on
    overtakes is Line's; between tenants it is TenantShares'.
    """

    def __init__(
        self,
        policy: Policy,
        around: Surroundings,
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
        self._lines: dict[Hashable, Line] = {}
        self._is_gate_closed = False  # in this round
        self._door = AdapterDoor(adapters)

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._preempted or self._lines)

    def __contains__(self, request: Request) -> bool:
        return request in self._preempted or request in self._lines.get(self._tenant(request), ())

    def __iter__(self) -> Iterator[Request]:
        """The preempted, then the others, of each tenant in order of arrival."""
        yield from reversed(self._preempted)
        for line in self._lines.values():
            yield from line

    @property
    def policy(self) -> Policy:
        """How the waiting are ranked; setting it ranks them anew, as if they had just come."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        waiting = sorted(
            (request for line in self._lines.values() for request in line), key=lambda r: r.id
        )
        self._policy = policy
        self._lines.clear()
        for request in waiting:
            self.add(request)

    def add(self, request: Request) -> None:
        """A request has arrived."""
        tenant = self._tenant(request)
        if tenant not in self._lines:
            self._lines[tenant] = Line(self._policy, self._around, self._max_overtakes, self._door)
        self._lines[tenant].add(request)

    def put_back(self, request: Request) -> None:
        """A request was preempted: it is the first to run again."""
        self._preempted[request] = None

    def remove(self, request: Request) -> None:
        """A request is admitted or has ended."""
        if request in self._preempted:
            del self._preempted[request]
            return
        tenant = self._tenant(request)
        self._lines[tenant].remove(request)
        if not len(self._lines[tenant]):
            del self._lines[tenant]

    def is_due(self, request: Request) -> bool:
        """Whether aging lets nobody overtake this request any more."""
        line = self._lines.get(self._tenant(request))
        return line is not None and line.is_due(request)

    def is_preempted(self, request: Request) -> bool:
        """Whether it has run already, and lost its pages to others."""
        return request in self._preempted

    def is_parked(self, request: Request) -> bool:
        """Whether it waits for the working set."""
        line = self._lines.get(self._tenant(request))
        return line is not None and line.is_parked(request)

    def park(self, request: Request) -> None:
        """The working set has no room for an offered request, and so none for others that are
        parked: none of them is offered again in this round."""
        self._lines[self._tenant(request)].park(request)
        self._is_gate_closed = True

    def has_slot(self, request: Request) -> bool:
        """Whether an offered request's adapter is on the device, or may come there. Where one that
        nobody may overtake has to wait for a slot, no other is offered any in this round."""
        if self._door.lets_in(group_of(request)):
            return True
        if self.is_due(request) or self.is_preempted(request):
            self._door.hold()
        return False

    def candidates(self) -> Generator[Request, None, None]:
        """One round: requests to admit, best first.

        The caller removes what it admits before it asks for the next; the others keep their places.
        A due request that is passed over ends the round of its tenant. Of the others those that
        would wait for their adapters' slots are not offered.
        """
        self._is_gate_closed = False
        self._door.begin_round()
        yield from tuple(reversed(self._preempted))
        opened: list[Line] = []
        try:
            yield from self._by_share(opened)
        finally:
            for line in opened:
                line.end_round()

    def _by_share(self, opened: list[Line]) -> Iterator[Request]:
        """Each tenant's best, that of the tenant with the least service first, until all lines are
        through. Lines are opened as they are needed: a round costs the same with ten tenants and
        with thousands, but for putting these in order."""
        num_refreshed = -(-self._policy.num_refreshed // max(1, min(len(self._lines), MAX_LINES)))
        lines = dict(self._lines)
        place = self._shares.place
        rest = sorted(((place(tenant), i, tenant) for i, tenant in enumerate(lines)), reverse=True)
        heads: list[_Head] = []
        given: dict[Hashable, int] = dict.fromkeys(lines, 0)  # tokens, in this round
        while heads or rest:
            if rest and (not heads or rest[-1][0] < heads[0][0]):
                for _ in range(min(len(rest), MAX_LINES)):
                    _, number, tenant = rest.pop()
                    if not lines[tenant].has_open(also_parked=not self._is_gate_closed):
                        continue
                    lines[tenant].begin_round(num_refreshed)
                    opened.append(lines[tenant])
                    self._push_head(heads, number, tenant, lines[tenant], 0)
                continue
            _, _, number, tenant, request = heappop(heads)
            line = lines[tenant]
            is_due = line.is_due(request)
            if is_due or not (self._is_gate_closed and line.is_parked(request)):
                yield request
                if request not in line:
                    given[tenant] += request.num_tokens
                elif is_due:
                    continue
            self._push_head(heads, number, tenant, line, given[tenant])

    def _push_head(
        self, heads: list[_Head], number: int, tenant: Hashable, line: Line, num_given: int
    ) -> None:
        best = line.best(also_parked=not self._is_gate_closed)
        if best is not None:
            share = self._shares.place(tenant, num_given)
            heappush(heads, (share, best[0], number, tenant, best[1]))

    def _tenant(self, request: Request) -> Hashable:
        return tenant_of(request) if self._policy.is_fair else None
