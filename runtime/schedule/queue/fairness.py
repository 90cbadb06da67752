"""Weighted fair sharing between tenants: who has had least, by weight, goes first.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) over service that is measured and not
announced: each tenant has a virtual time, the service that its requests have had divided by its
weight. Who comes back after a while without work starts at the least virtual time of those who have
some, so nobody saves up what was not used. Tenants are told apart by quanta of virtual time; within
a quantum the policy decides between them, so that a shared prefix is still used together, and where
it finds them equal, their times do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from ....errors import InvalidRequest
from ..request import Request

QUANTUM = 2048  # tokens of service: a step's budget, so about one round's admissions (guess)
_MAX_TENANTS = 4096  # that are remembered while they have no work


def tenant_of(request: Request) -> Hashable:
    """Who pays for a request; all that belong to no program are one tenant's."""
    return "" if request.program is None else request.program.tenant


class TenantShares:
    """The tenants' virtual times.

    Invariant: between tenants that have work all the time, the services by weight differ by at most
    a quantum and what they have running at once.
    """

    def __init__(
        self, weights: Mapping[Hashable, float] | None = None, quantum: int = QUANTUM
    ) -> None:
        """`weights`: above 0; 1 for tenants that are not in it."""
        self.weights = dict(weights or {})
        self._quantum = quantum
        self._times: OrderedDict[Hashable, float] = OrderedDict()  # the last to come back last
        self._num_open: dict[Hashable, int] = {}  # requests, of tenants that have some
        self._open_weight = 0.0  # of these tenants, added up
        self._by_time: list[tuple[float, int, Hashable]] = []  # of these; its times may be past
        self._num_entered = 0

    @property
    def num_open(self) -> int:
        """Tenants that have requests."""
        return len(self._num_open)

    def weight(self, tenant: Hashable) -> float:
        """1 unless stated."""
        return self.weights.get(tenant, 1.0)

    def part(self, tenant: Hashable) -> float:
        """A tenant's share, in (0, 1], of what those have that have requests, it among them."""
        return min(1.0, self.weight(tenant) / self._open_weight)

    def enter(self, request: Request) -> None:
        """A request has come."""
        tenant = tenant_of(request)
        if tenant not in self._num_open:
            self._times[tenant] = max(self._times.get(tenant, 0.0), self._least())
            self._times.move_to_end(tenant)
            self._num_open[tenant] = 0
            self._open_weight += self.weight(tenant)
            self._note_open(tenant)
        self._num_open[tenant] += 1

    def leave(self, request: Request) -> None:
        """It has ended."""
        tenant = tenant_of(request)
        self._num_open[tenant] -= 1
        if self._num_open[tenant]:
            return
        del self._num_open[tenant]
        self._open_weight -= self.weight(tenant)
        if not self._num_open:
            self._open_weight = 0.0
            self._times.clear()  # nobody has work: all are equal again
            self._by_time.clear()
        while len(self._times) - len(self._num_open) > _MAX_TENANTS:
            self._times.pop(next(t for t in self._times if t not in self._num_open))

    def charge(self, request: Request, service: float) -> None:
        """A step has cost so much for a request: its program and its tenant have had that."""
        if request.program is not None:
            request.program.service += service
        tenant = tenant_of(request)
        self._times[tenant] += service / self.weight(tenant)

    def charge_all(self, requests: Sequence[Request], services: Sequence[float]) -> bool:
        """The same for each of the requests, so many times, if they are one tenant's, and no two of
        one program, and every program stays on its level; else nobody is charged. Whether it was
        done."""
        programs = [request.program for request in requests if request.program is not None]
        most = 1.0 + sum(services)  # 1.0: whatever the order of sums does to the last bits
        if any(each.service + most >= each.level_end for each in programs):
            return False
        tenants = set(map(tenant_of, requests))
        if len(tenants) > 1 or len(set(programs)) < len(programs):
            return False
        for program in programs:
            had = program.service
            for service in services:
                had += service
            program.service = had
        for tenant in tenants:
            weight, time = self.weight(tenant), self._times[tenant]
            for service in services:
                part = service / weight
                for _ in requests:
                    time += part
            self._times[tenant] = time
        return True

    def place(self, tenant: Hashable, num_more: float = 0.0) -> int:
        """Quanta that a tenant is ahead of the one that has had least, with `num_more` tokens that
        it is about to have."""
        return int((self.time(tenant, num_more) - self._least()) // self._quantum)

    def time(self, tenant: Hashable, num_more: float = 0.0) -> float:
        """A tenant's virtual time, with `num_more` tokens that it is about to have."""
        return self._times.get(tenant, 0.0) + num_more / self.weight(tenant)

    def _note_open(self, tenant: Hashable) -> None:
        self._num_entered += 1
        heappush(self._by_time, (self._times[tenant], self._num_entered, tenant))
        if len(self._by_time) > 2 * len(self._num_open) + 64:
            open_now = enumerate(self._num_open)
            self._by_time = [(self._times[tenant], i, tenant) for i, tenant in open_now]
            self._num_entered = len(self._by_time)
            heapify(self._by_time)

    def _least(self) -> float:
        """Of those that have work. Times only grow: an entry is put right when it comes first."""
        while self._by_time:
            time, number, tenant = self._by_time[0]
            if tenant not in self._num_open:
                heappop(self._by_time)
            elif time < self._times[tenant]:
                heapreplace(self._by_time, (self._times[tenant], number, tenant))
            else:
                return time
        return 0.0


def tenant_weights(text: str) -> dict[Hashable, float]:
    """From "a=2,b=0.5". Raises InvalidRequest."""
    weights: dict[Hashable, float] = {}
    for item in filter(None, text.split(",")):
        name, _, number = item.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not name or not 0.001 <= weight <= 1000.0:
            raise InvalidRequest.of("tenant_weights", item, "NAME=WEIGHT, 0.001 to 1000")
        weights[name] = weight
    return weights
