"""Which prefixes a program will need again, and when: leases derived from its branches' state.

    what a branch does              its prefix is due
    a call waits or runs            now
    waits for others (Var, Join)    soon
    Pause                           when the pause is expected to end
    nothing known                   after its client's usual time to think
    has ended, or failed            never: its own part goes first

A fork's prefix is leased until all children have had their first call. A branch has at most one
lease; a program that has ended has none. Prefixes needed only once are never leased, so single
calls pay nothing.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...frontend.protocol import ir
from ...radix.leases import Lease
from ..schedule.queue.policy import RunningMean
from .branch_kv import Shown
from .engine_branch import EngineBranch

SOON_S = 0.2  # until what a branch waits for is done (guess)
FIRST_THINK_S = 0.5  # of a client without a measured think time (guess)
MIN_TTL_S = 30.0
MAX_TTL_S = 3600.0
TTL_FACTOR = 4.0  # times the expected time: later uses are assumed not to come (guess)
FORK_PRIORITY = 10  # above single branches: a fork's prefix has many users
MAX_HABITS = 4096


class KVLeases(Protocol):
    """The cache's interface to programs; times are seconds from now."""

    def retain(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        *,
        due_s: float,
        ttl_s: float,
        priority: int = 0,
    ) -> Lease | None:
        """Lease what is cached of a prefix for its next use; None if nothing is cached."""

    def release_lease(self, lease: Lease, *, is_last_use: bool = False) -> None:
        """End a lease; `is_last_use`: what nobody else uses of it is evicted before all else."""


class ThinkTimes:
    """Think times of clients and run times of tools: running means, least recently used dropped."""

    def __init__(self) -> None:
        self._means: OrderedDict[Hashable, RunningMean] = OrderedDict()

    def expected_s(self, key: Hashable) -> float:
        """The usual time in seconds."""
        mean = self._means.get(key)
        return FIRST_THINK_S if mean is None else mean.value

    def note(self, key: Hashable, seconds: float) -> None:
        """Add a measured time."""
        if key not in self._means:
            self._means[key] = RunningMean(seconds, 0)
        self._means[key].add(seconds)
        self._means.move_to_end(key)
        if len(self._means) > MAX_HABITS:
            self._means.popitem(last=False)


@dataclass(slots=True, eq=False)
class _Kept:
    """A branch's lease, since when the branch is idle, and why."""

    lease: Lease | None = None
    idle_since_s: float | None = None
    habit: Hashable = None
    has_called: bool = False


@dataclass(slots=True, eq=False)
class _ForkKept:
    """The prefix of a fork, for children that have not had a call yet."""

    namespace: Hashable
    ids: array[int]
    children: set[EngineBranch]
    lease: Lease | None = None


@dataclass(slots=True, eq=False)
class LeaseManager:
    """Owns the leases of one program."""

    kv: KVLeases
    think_times: ThinkTimes
    tenant: Hashable
    shown: Callable[[EngineBranch, array[int]], Shown]  # tokens as calls have their KV
    clock: Callable[[], float] = time.monotonic
    namespace: Hashable = ""
    _kept: dict[EngineBranch, _Kept] = field(default_factory=dict)
    _forks: dict[EngineBranch, _ForkKept] = field(default_factory=dict)  # by child

    def note_op(self, branch: EngineBranch) -> None:
        """An op has arrived for a branch."""
        kept = self._kept.get(branch)
        if kept is not None and kept.idle_since_s is not None:
            self.think_times.note(kept.habit, self.clock() - kept.idle_since_s)
            kept.idle_since_s = None

    def note_fork(self, branch: EngineBranch, children: Sequence[EngineBranch]) -> None:
        """Children have begun at the current end of `branch`."""
        if len(children) == 1:
            return  # the child's own lease suffices
        ids = self.shown(branch, branch.begun.ids[:]).ids
        fork = _ForkKept(self._of(branch), ids, set(children))
        self._forks.update(dict.fromkeys(children, fork))
        self._renew_fork(fork)

    def note_call_done(self, branch: EngineBranch) -> None:
        """A call of the branch has succeeded: its KV is cached now."""
        self._kept.setdefault(branch, _Kept()).has_called = True
        self._leave_fork(branch)

    def settle(self, branch: EngineBranch, pause: ir.Pause | None, *, is_last: bool) -> None:
        """The branch cannot continue now: lease what it will need. `is_last`: no op follows on any
        branch, so one without ops has ended."""
        if branch.error is not None or branch.is_ended or (is_last and not branch.log):
            self.end(branch)
            return
        kept = self._kept.get(branch)
        if kept is None or not kept.has_called:
            return
        due_s = self._due_s(branch, kept, pause)
        ttl_s = min(MAX_TTL_S, max(MIN_TTL_S, TTL_FACTOR * due_s))
        old, ids = kept.lease, self.shown(branch, branch.begun.ids).ids
        kept.lease = self.kv.retain(self._of(branch), ids, due_s=due_s, ttl_s=ttl_s)
        if old is not None:
            self.kv.release_lease(old)

    def end(self, branch: EngineBranch) -> None:
        """The branch needs nothing any more: release its lease."""
        self._leave_fork(branch)
        kept = self._kept.pop(branch, None)
        if kept is not None and kept.lease is not None:
            self.kv.release_lease(kept.lease, is_last_use=True)

    def end_all(self) -> None:
        """The program has ended: release all leases."""
        for branch in [*self._forks, *self._kept]:
            self.end(branch)

    def _due_s(self, branch: EngineBranch, kept: _Kept, pause: ir.Pause | None) -> float:
        if branch.call is not None:
            return 0.0
        if branch.is_waiting:
            return SOON_S
        kept.habit = (self.tenant, "think" if pause is None else pause.label)
        kept.idle_since_s = self.clock()
        if pause is not None and pause.expected_s is not None:
            return pause.expected_s
        return self.think_times.expected_s(kept.habit)

    def _of(self, branch: EngineBranch) -> Hashable:
        """The namespace of the branch's KV: its last call's, which may have an adapter."""
        return self.namespace if branch.namespace is None else branch.namespace

    def _leave_fork(self, child: EngineBranch) -> None:
        fork = self._forks.pop(child, None)
        if fork is None:
            return
        fork.children.discard(child)
        self._renew_fork(fork)

    def _renew_fork(self, fork: _ForkKept) -> None:
        """Lease the prefix again, as more of it may be cached; without children release it."""
        old, fork.lease = fork.lease, None
        if fork.children:
            fork.lease = self.kv.retain(
                fork.namespace, fork.ids, due_s=0.0, ttl_s=MIN_TTL_S, priority=FORK_PRIORITY
            )
        if old is not None:
            self.kv.release_lease(old)
