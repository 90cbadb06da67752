"""The working set: which programs may have their KV in the pool at the same time.

When more programs are active than their contexts fit, each evicts what another is about to use, and
everything is computed again at every call: thrashing. Denning's remedy ("The working set model for
program behavior", CACM 11(5), 1968) is to run a process only if its working set fits, and to let
the others wait outside. Here a program's working set is its context, kept by a lease between its
calls (Continuum, arXiv:2511.02230, keeps it for a time to live). A program that has its context is
never held up. One that is new, or whose context was given up, joins if

  - all that those inside are expected to grow by, and it too, fits what no lease holds (at the
    worst future time: each ends and gives back, as in admission.py); or
  - the device has time to spare (`StepCosts.load`): to compute a context again then costs nothing
    that anybody waits for, while a pause unused is lost; or
  - it has had much less service than those inside, so that short programs pass long ones.

What contexts grow to is learned from programs that have ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate

from ..cache.kv_cache import KVCacheManager
from ..program_record import ProgramRecord
from ..request import Request
from .step_costs import StepCosts

MAX_LOAD = 0.7  # of the device, up to which to compute contexts again costs nobody anything
MIN_LEVELS_BELOW = 2  # below the programs inside: to pass them
_MEMORY = 64  # ended programs of a tenant whose contexts are remembered
_MAX_TENANTS = 1024
MAX_ABSENT_S = 60.0  # a program without calls for longer is not inside


class ContextSizes:
    """How long the contexts of programs become, by tenant."""

    def __init__(self) -> None:
        self._of_tenant: OrderedDict[Hashable, _Sizes] = OrderedDict()

    def note(self, program: ProgramRecord) -> None:
        """A program has ended."""
        sizes = self._of_tenant.setdefault(program.tenant, _Sizes())
        sizes.add(program.num_context_tokens)
        self._of_tenant.move_to_end(program.tenant)
        if len(self._of_tenant) > _MAX_TENANTS:
            self._of_tenant.popitem(last=False)

    def growth(self, tenant: Hashable, num_tokens: int) -> float:
        """By how much a context of `num_tokens` is still expected to grow: as those did that became
        longer than that; 0 where none did. O(log n)."""
        sizes = self._of_tenant.get(tenant)
        return 0.0 if sizes is None else sizes.mean_above(num_tokens) - num_tokens


class _Sizes:
    """The last sizes, also sorted, with sums of the largest."""

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=_MEMORY)
        self._sorted: list[int] = []
        self._sums: list[int] = []  # of _sorted[i:]

    def add(self, size: int) -> None:
        self._last.append(size)
        self._sorted = sorted(self._last)
        self._sums = list(accumulate(reversed(self._sorted)))[::-1]

    def mean_above(self, size: int) -> float:
        """Of those that are larger; `size` where none is."""
        first = bisect_right(self._sorted, size)
        num = len(self._sorted) - first
        return self._sums[first] / num if num else size


class WorkingSet:
    """Who is inside, and whether a request's program may join.

    Invariant: a program that has its context, and a request that is due, are never refused; nor is
    anybody while no lease holds anything.
    """

    def __init__(
        self, kv_cache: KVCacheManager, costs: StepCosts, clock: Callable[[], float]
    ) -> None:
        self.contexts = ContextSizes()
        self._kv_cache = kv_cache
        self._costs = costs
        self._clock = clock
        self._inside: dict[ProgramRecord, float] = {}  # when it last had a call

    def note_admission(self, request: Request) -> None:
        """A request's pages are reserved: its program is inside."""
        program = request.program
        if program is None:
            return
        if not program.num_calls_started:
            program.num_shared_tokens = request.num_computed_tokens
        program.num_calls_started += 1
        self._inside[program] = self._clock()

    def note_finish(self, request: Request) -> None:
        """A call of a program has ended."""
        program = request.program
        if program is not None:
            program.num_context_tokens = max(program.num_context_tokens, request.num_tokens)
            if program in self._inside:
                self._inside[program] = self._clock()

    def end(self, program: ProgramRecord) -> None:
        """A program has ended."""
        self._inside.pop(program, None)
        if program.num_context_tokens:
            self.contexts.note(program)

    def is_welcome(self, request: Request) -> bool:
        """Whether an attached request needs no leave to join: nobody would be pushed out, or its
        program has its context."""
        return not self._kv_cache.tree.leased_pages or self._has_context(request)

    def may_join(self, request: Request, num_missing: int) -> bool:
        """Whether an attached request, which needs pages for `num_missing` tokens more (its own and
        those of others in this step), may have them where that breaks leases."""
        now_s = self._clock()
        if self._costs.load(now_s) < MAX_LOAD:
            return True
        num_free = self._kv_cache.num_free_pages * self._kv_cache.page_size - num_missing
        if num_free >= 0 and self._peak_growth(request, now_s) <= num_free:
            return True
        return self._passes(request, -num_free)

    @property
    def opens_s(self) -> float:
        """By the clock: when the device has time to spare, if nothing happens."""
        now_s = self._clock()
        return now_s + self._costs.seconds_until(MAX_LOAD, now_s)

    def _has_context(self, request: Request) -> bool:
        """Whether at least half of what its program's calls had is still there, on the device or on
        the host, from where it costs little."""
        program = request.program
        if program is None or program not in self._inside:
            return False
        known = min(program.num_context_tokens, request.num_tokens) - program.num_shared_tokens
        kept = self._num_kept(request) - program.num_shared_tokens
        if 2 * kept >= known:
            return True
        del self._inside[program]
        return False

    def _num_kept(self, request: Request) -> int:
        host = self._kv_cache.host
        if host is None:
            return request.num_computed_tokens
        match = host.match(request.namespace, request.token_ids, request.match_limit)
        return max(request.num_computed_tokens, 0 if match is None else match.num_tokens)

    def _peak_growth(self, request: Request, now_s: float) -> float:
        """The most tokens that those inside, and the request's program, will need at once beyond
        what they have. All grow alike; one that ends gives back its context."""
        growth = self.contexts.growth
        joining = request.program
        tenant = "" if joining is None else joining.tenant
        ends = [(growth(tenant, request.num_tokens), 0)]
        for program in self._present(now_s):
            if program is not joining:
                num_tokens = program.num_context_tokens
                own = max(0, num_tokens - program.num_shared_tokens)
                ends.append((growth(program.tenant, num_tokens), own))
        peak = given_back = 0.0
        num_left = len(ends)
        for num_more, own in sorted(ends):
            peak = max(peak, num_left * num_more - given_back)
            given_back += own + num_more
            num_left -= 1
        return peak

    def _passes(self, request: Request, num_short: int) -> bool:
        """Whether programs of much higher levels hold what a request is short of."""
        program = request.program
        level = MIN_LEVELS_BELOW + (0 if program is None else program.level)
        held = sum(
            p.num_context_tokens - p.num_shared_tokens for p in self._inside if p.level >= level
        )
        return held >= num_short > 0

    def _present(self, now_s: float) -> Iterable[ProgramRecord]:
        for program, seen_s in list(self._inside.items()):
            if now_s - seen_s > MAX_ABSENT_S:
                del self._inside[program]
            else:
                yield program
