"""Who of the running gives way, so that a tenant with less than its share gets some.

Whom fairness.py lets in next still waits until there is room, and requests run for as long as they
generate: one tenant's flood of long ones would hold every row. So where rows or pages are lacking,
each is shared by weight between the tenants that have work. Who wants no more than its part has a
claim to it, and of the tenant that has most the last admitted request that is beyond its part is
preempted: its output stays the same, its KV stays cached while there is room.

Nobody is preempted to and fro: who gives way keeps its part, and who gets has no more than its
part. What alone is larger than its tenant's part waits, and is waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from ..request import Request
from .admission import NewTokenEstimate
from .fairness import TenantShares, tenant_of

RETRY_STEPS = 64  # after a claim that was in vain: its requests waited for something else (guess)


@dataclass(frozen=True, slots=True)
class Claim:
    """`tenant` is asked first, and has the room that `victim` gives back, if there is one."""

    tenant: Hashable
    victim: Request | None


class Claims:
    """Finds claims: one a step at most."""

    def __init__(
        self, shares: TenantShares, new_tokens: NewTokenEstimate, num_rows: int, num_tokens: int
    ) -> None:
        """`num_rows`, `num_tokens` of KV: what there is to share. A request counts with the tokens
        that it will have, as it does when it is admitted."""
        self._shares = shares
        self._end = new_tokens.end
        self._num_rows = num_rows
        self._num_tokens = num_tokens
        self._num_steps = 0
        self._retry_at: dict[Hashable, int] = {}

    def find(
        self,
        waiting: Collection[Hashable],
        running: Sequence[Request],
        num_free_rows: int,
        unplaced: Request | None,
    ) -> Claim | None:
        """`waiting`: tenants; `running`: the next to be preempted last; `unplaced`: for which there
        were no pages in the step before. O(running + waiting tenants)."""
        self._num_steps += 1
        has_room = num_free_rows and unplaced is None
        if self._shares.num_open < 2 or has_room or not running:
            return None
        able = [t for t in waiting if self._retry_at.get(t, 0) <= self._num_steps]
        if not able:
            return None
        if unplaced is None:
            return self._claim_to_rows(able, running)
        return self._claim_to_pages(able, running, unplaced)

    def note_vain(self, tenant: Hashable) -> None:
        """A tenant had room, and none of its requests could have it."""
        now = self._num_steps
        self._retry_at = {t: step for t, step in self._retry_at.items() if step > now}
        self._retry_at[tenant] = now + RETRY_STEPS

    def _claim_to_rows(self, able: Sequence[Hashable], running: Sequence[Request]) -> Claim | None:
        held = Counter(map(tenant_of, running))
        poorest = min(able, key=self._by_weight(held))
        if held[poorest] + 1 > self._rows_of(poorest):
            return None
        victim = self._victim(running, held, self._rows_of, lambda request: 1)
        return None if victim is None else Claim(poorest, victim)

    def _claim_to_pages(
        self, able: Sequence[Hashable], running: Sequence[Request], unplaced: Request
    ) -> Claim | None:
        """Of whom is below its part, where the unplaced request's tenant is above: else that is the
        next to have what becomes free, however much it needs."""
        held: Counter[Hashable] = Counter()
        for request in running:
            held[tenant_of(request)] += self._end(request)
        tenant = tenant_of(unplaced)
        poorest = min(able, key=self._by_weight(held))
        if poorest != tenant and held[tenant] > self._tokens_of(tenant):
            return Claim(poorest, None) if held[poorest] < self._tokens_of(poorest) else None
        if held[tenant] + self._end(unplaced) > self._tokens_of(tenant):
            return None
        victim = self._victim(running, held, self._tokens_of, self._end)
        return None if victim is None else Claim(tenant, victim)

    def _victim(
        self,
        running: Sequence[Request],
        held: Counter[Hashable],
        part: Callable[[Hashable], float],
        size: Callable[[Request], int],
    ) -> Request | None:
        """The last request beyond its part of the tenant that has most by weight."""
        richest = max(held, key=self._by_weight(held))
        left = part(richest)
        for request in reversed(running):
            if tenant_of(request) == richest and held[richest] - size(request) >= left:
                return request
        return None

    def _by_weight(self, held: Counter[Hashable]) -> Callable[[Hashable], float]:
        return lambda tenant: held[tenant] / self._shares.weight(tenant)

    def _rows_of(self, tenant: Hashable) -> float:
        return max(1, int(self._num_rows * self._shares.part(tenant)))

    def _tokens_of(self, tenant: Hashable) -> float:
        return self._num_tokens * self._shares.part(tenant)
