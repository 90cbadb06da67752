"""How much work a replica is expected to have: of its open programs, not of its requests in flight.

An agent between two calls has no request and will be back; so a program counts with what its calls
usually compute, by the share of its time that it usually spends computing. Everything is in tokens
of a prompt: a token that is generated counts as `ROW_TOKENS` of these.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from math import inf

# A row of a batch against a token of a prompt, in time (llama-160m and a 1B on a CPU, batches of 4
# to 32: 2 to 6). What is off by a factor shifts the weight of queues against that of prefixes.
ROW_TOKENS = 4.0
BYTES_PER_TOKEN = 4.0  # of texts that nobody has tokenized yet
MAX_KINDS = 4096
_MEMORY = 0.2  # weight of the newest observation
_NEW_OUTPUT_TOKENS = 64.0  # of a call, before any of its kind has ended


@dataclass(slots=True)
class Habits:
    """What programs of one kind usually do."""

    output_tokens: float = _NEW_OUTPUT_TOKENS  # of a call
    call_s: float = 1.0
    think_s: float = 0.0  # between two calls
    num_calls: float = 1.0

    def note_call(self, output_tokens: int, call_s: float) -> None:
        """A call has ended."""
        self.output_tokens += _MEMORY * (output_tokens - self.output_tokens)
        self.call_s += _MEMORY * (call_s - self.call_s)

    def note_thought(self, think_s: float) -> None:
        """So long a program had no call between two."""
        self.think_s += _MEMORY * (think_s - self.think_s)

    def note_end(self, num_calls: int) -> None:
        """A program has ended."""
        self.num_calls += _MEMORY * (num_calls - self.num_calls)

    @property
    def busy_share(self) -> float:
        """Of a program's time between its first and last call, what its calls take."""
        return self.call_s / (self.call_s + self.think_s) if self.call_s else 1.0


class AllHabits:
    """The habits of each kind of program: those whose first call is on the same line of source."""

    def __init__(self) -> None:
        self._by_kind: OrderedDict[Hashable, Habits] = OrderedDict()

    def of(self, kind: Hashable) -> Habits:
        """New ones for a kind that is not known."""
        habits = self._by_kind.get(kind)
        if habits is None:
            habits = self._by_kind[kind] = Habits()
            if len(self._by_kind) > MAX_KINDS:
                self._by_kind.popitem(last=False)
        self._by_kind.move_to_end(kind)
        return habits


@dataclass(slots=True)
class _TenantLoad:
    weight: float
    num_programs: int = 0
    expected_tokens: float = 0.0


@dataclass(slots=True)
class ReplicaLoad:
    """The sums over one replica's open programs."""

    num_calls: int = 0  # in flight
    expected_tokens: float = 0.0  # what they will have it compute in about the time of one call
    held_tokens: float = 0.0  # KV that they will want again
    tenants: dict[Hashable, _TenantLoad] = field(default_factory=dict)  # of those with programs
    weights: Mapping[Hashable, float] = field(default_factory=dict)  # 1 for who is not in it
    _sum_of_weights: float = 0.0  # of those with programs

    def enter(self, tenant: Hashable) -> _TenantLoad:
        """One more program of a tenant's; returns what counts for all of them."""
        load = self.tenants.get(tenant)
        if load is None:
            load = self.tenants[tenant] = _TenantLoad(self.weights.get(tenant, 1.0))
            self._sum_of_weights += load.weight
        load.num_programs += 1
        return load

    def leave(self, tenant: Hashable) -> None:
        """One fewer."""
        load = self.tenants[tenant]
        load.num_programs -= 1
        if not load.num_programs:
            del self.tenants[tenant]
            self._sum_of_weights = self._sum_of_weights - load.weight if self.tenants else 0.0

    def ahead_of(self, tenant: Hashable, num_tokens: float) -> float:
        """Of `expected_tokens`, what is computed before so many more of a tenant's: engines have
        tenants take turns, so of each other one no more than its own, by what both weigh."""
        own = self.tenants.get(tenant)
        if own is None:
            before = self._sum_of_weights / self.weights.get(tenant, 1.0) * num_tokens
        else:
            before = own.expected_tokens
            before += (self._sum_of_weights / own.weight - 1.0) * (before + num_tokens)
        return before if before < self.expected_tokens else self.expected_tokens


class ProgramLoad:
    """One open program as its replica's load sees it. Invariant: its part is in `_total`."""

    def __init__(
        self, habits: Habits, clock: Callable[[], float] = time.monotonic, tenant: Hashable = ""
    ) -> None:
        self.habits = habits
        self.tenant = tenant
        self.num_calls = 0  # in flight
        self.num_ended = 0
        self.missing_tokens = 0.0  # of its prompt, not computed yet as far as is known
        self.max_tokens = inf  # that its next call, or the last one begun, may generate
        self._clock = clock
        self._held_tokens = 0.0
        self._since_s = 0.0  # of the first call in flight, or of the last one's end
        self._total: ReplicaLoad | None = None  # None: it is nowhere
        self._part = ReplicaLoad()
        self._tenant_load = _TenantLoad(1.0)  # all that its tenant has there

    def enter(self, total: ReplicaLoad, missing_tokens: float) -> None:
        """It runs on this replica from now on, which has to compute so much of its prompt."""
        self.leave()
        self._total = total
        self._tenant_load = total.enter(self.tenant)
        self.missing_tokens = missing_tokens
        self._count()

    def leave(self) -> None:
        """It is nowhere."""
        if self._total is not None:
            self._become(0, 0.0, 0.0)
            self._total.leave(self.tenant)
        self._total = None
        self.num_calls = 0

    def begin_call(self, max_tokens: float = inf) -> None:
        """A call was sent, which may generate so much."""
        self.max_tokens = max_tokens
        if not self.num_calls:
            now_s = self._clock()
            if self.num_ended:
                self.habits.note_thought(now_s - self._since_s)
            self._since_s = now_s
        self.num_calls += 1
        self._count()

    def end_call(self, prompt_tokens: int, output_tokens: int) -> None:
        """One has ended."""
        self.num_calls = max(0, self.num_calls - 1)
        self.num_ended += 1
        self.missing_tokens = 0.0
        self._held_tokens = max(self._held_tokens, prompt_tokens + output_tokens)
        now_s = self._clock()
        self.habits.note_call(output_tokens, now_s - self._since_s)
        self._since_s = now_s
        self._count()

    @property
    def output_tokens(self) -> float:
        """What a call of it is expected to generate: as usual, and no more than it may."""
        return min(self.habits.output_tokens, self.max_tokens)

    @property
    def held_tokens(self) -> float:
        """KV that it will want again."""
        return max(self._held_tokens, self.missing_tokens)

    @property
    def expected_tokens(self) -> float:
        """Its part of what its replica is expected to compute."""
        return self._part.expected_tokens

    def end(self) -> None:
        """The program has ended."""
        self.habits.note_end(self.num_ended)
        self.leave()

    def _count(self) -> None:
        rows = self.output_tokens * ROW_TOKENS
        if self.num_calls:
            expected = self.missing_tokens + self.num_calls * rows
        else:
            expected = self.habits.busy_share * rows
        self._become(self.num_calls, expected, self.held_tokens)

    def _become(self, num_calls: int, expected_tokens: float, held_tokens: float) -> None:
        """Its part of its replica's load is another one now."""
        part, total = self._part, self._total
        if total is None:
            return
        total.num_calls += num_calls - part.num_calls
        total.expected_tokens += expected_tokens - part.expected_tokens
        total.held_tokens += held_tokens - part.held_tokens
        self._tenant_load.expected_tokens += expected_tokens - part.expected_tokens
        part.num_calls, part.expected_tokens = num_calls, expected_tokens
        part.held_tokens = held_tokens
