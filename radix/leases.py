"""Leases: which cached prefixes to keep, how long, and in which order to evict them.

A lease says that a program will use a prefix again, at about `due_s`. It takes the prefix out of
the least-recently-used order without locking it. When pages are short, leases are broken: lowest
priority first, among equals the one with the furthest next use (Belady's rule, "A study of
replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966, with
announced uses instead of known ones), each from its end and no more of it than is needed. A pin is
a lease that is not broken this way; pins share a budget and always expire.

What it does not know: programs, clocks (times are the caller's seconds), pages' contents.

Cost: a lease O(nodes on the path), breaking and expiry O(log n) each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .node import Node
from .owners import age
from .tree import RadixTree

__all__ = ["Lease", "Leases"]


@dataclass(slots=True, eq=False)
class Lease:
    """Keeps the path to `node`; `node` moves up as it is broken, and is None after its end.

    `colder`: the lease on the same prefix on the next colder tier, if there is one.
    """

    node: Node | None
    num_tokens: int  # of the path when it was made
    due_s: float  # when it is expected to be used again
    expires_s: float
    priority: int = 0  # higher is broken later
    is_pin: bool = False
    colder: Lease | None = None

    @property
    def is_active(self) -> bool:
        """Whether it still keeps KV, on this tier or a colder one."""
        return self.node is not None or (self.colder is not None and self.colder.is_active)

    @property
    def num_kept_tokens(self) -> int:
        """How many tokens of the prefix it still keeps on this tier."""
        return 0 if self.node is None else self.node.end


_BreakKey = tuple[int, float, int]  # priority, -due_s, number


class Leases:
    """Owns the leases on one tree.

    Invariant: `tree.pinned_pages <= max_pinned_pages`. A lease ends by release, expiry, or when it
    is broken to the root; its KV is then evicted like any other.
    """

    def __init__(
        self,
        tree: RadixTree,
        max_pinned_pages: int,
        on_break: Callable[[Lease], None] | None = None,
    ) -> None:
        """`on_break` is called with a lease each time before part of it is given up."""
        self.max_pinned_pages = max_pinned_pages
        self.num_broken = 0  # leases that lost a part
        self._tree = tree
        self._on_break = on_break
        self._active: dict[Lease, _BreakKey] = {}
        self._to_break: list[tuple[_BreakKey, Lease]] = []
        self._to_expire: list[tuple[float, int, Lease]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[Lease]:
        """Active leases, oldest first."""
        return iter(self._active)

    def retain(self, node: Node, *, due_s: float, expires_s: float, priority: int = 0) -> Lease:
        """Keep the path to `node` in preference to unleased KV, and to leases of lower priority or
        later use."""
        return self._add(Lease(node, node.end, due_s, expires_s, priority))

    def pin(self, node: Node, *, expires_s: float) -> Lease | None:
        """Keep the path to `node`, or as much of it from the root as the budget allows; None if
        that is nothing."""
        kept = self._within_budget(node)
        if kept is None:
            return None
        return self._add(Lease(kept, kept.end, 0.0, expires_s, is_pin=True))

    def release(self, lease: Lease, *, is_last_use: bool = False) -> None:
        """End a lease; does nothing if it has ended. `is_last_use`: KV that only its owner has used
        is evicted before all else (owners.py)."""
        if lease.node is not None:
            node, lease.node = lease.node, None
            del self._active[lease]
            self._tree.unlease(node, is_pin=lease.is_pin)
            if is_last_use and node.is_attached:
                age(node, self._tree.use_order)

    def update(self, lease: Lease, *, due_s: float, expires_s: float) -> None:
        """Expect the use at another time; does nothing if the lease has ended."""
        if lease.node is not None:
            lease.due_s, lease.expires_s = due_s, expires_s
            self._enter(lease)

    def move(self, lease: Lease, node: Node) -> None:
        """Keep the path to `node` instead, not for pins; an ended lease becomes active again."""
        assert not lease.is_pin, "a pin has its budget and stays where it is"
        self._tree.lease(node)
        if lease.node is not None:
            self._tree.unlease(lease.node)
        lease.node, lease.num_tokens = node, node.end
        self._enter(lease)

    def expire(self, now_s: float) -> None:
        """End expired leases."""
        while self._to_expire and self._to_expire[0][0] <= now_s:
            lease = heappop(self._to_expire)[2]
            if lease.expires_s <= now_s:
                self.release(lease)

    def give_up(
        self, num_pages: int, *, due_after_s: float | None = None, also_pins: bool = False
    ) -> None:
        """Break leases until the tree has `num_pages` evictable pages, or none can be broken.

        `due_after_s`: break only leases that are due later.
        """
        locked: list[tuple[_BreakKey, Lease]] = []
        while (missing := num_pages - self._tree.evictable_pages) > 0:
            # If all leased pages are locked too, none can be freed.
            lease = self._next_to_break() if self._tree.leased_pages else None
            if lease is None or (due_after_s is not None and lease.due_s <= due_after_s):
                break
            assert lease.node is not None
            if lease.node.lock_ref:  # breaking it now would free nothing
                locked.append(heappop(self._to_break))
            else:
                self._break(lease, missing)
        for item in locked:
            heappush(self._to_break, item)
        if also_pins:
            self._break_pins(num_pages)

    def withdraw(self, node: Node) -> None:
        """End leases on `node` and below it, which is about to leave the tree.

        Cost: O(leases and their paths); for undoing failed steps.
        """
        for lease in list(self._active):
            step = lease.node
            while step is not None and step is not node:
                step = step.parent
            if step is not None:
                self._cut(lease, node.parent)

    def release_all(self) -> None:
        """End every lease."""
        for lease in list(self._active):
            self.release(lease)

    def nodes(self) -> list[tuple[Node, bool]]:
        """(node, whether it is a pin) of each lease, for checks."""
        return [(lease.node, lease.is_pin) for lease in self._active if lease.node is not None]

    def _add(self, lease: Lease) -> Lease:
        assert lease.node is not None
        self._tree.lease(lease.node, is_pin=lease.is_pin)
        self._enter(lease)
        return lease

    def _enter(self, lease: Lease) -> None:
        number = next(self._numbers)
        key = (lease.priority, -lease.due_s, number)
        self._active[lease] = key
        if not lease.is_pin:
            heappush(self._to_break, (key, lease))
        heappush(self._to_expire, (lease.expires_s, number, lease))
        self._compact()

    def _next_to_break(self) -> Lease | None:
        while self._to_break:
            key, lease = self._to_break[0]
            if self._active.get(lease) == key:
                return lease
            heappop(self._to_break)
        return None

    def _break(self, lease: Lease, num_pages: int) -> None:
        """Give up the end of a lease's path: its last node, or only the last `num_pages` pages of
        it if these become free."""
        node = lease.node
        assert node is not None
        self._note_break(lease)
        if node.lease_ref == 1 and len(node.pages) > num_pages:
            self._tree.split(node, node.end - num_pages * self._tree.page_size)
        self._cut(lease, node.parent)

    def _break_pins(self, num_pages: int) -> None:
        for lease in [lease for lease in self._active if lease.is_pin]:
            if self._tree.evictable_pages >= num_pages:
                return
            self._note_break(lease)
            self.release(lease)

    def _note_break(self, lease: Lease) -> None:
        self.num_broken += lease.num_kept_tokens == lease.num_tokens
        if self._on_break is not None:
            self._on_break(lease)

    def _cut(self, lease: Lease, node: Node | None) -> None:
        """Keep only the path to `node`, which is part of the lease's."""
        assert lease.node is not None
        if node is None or node.is_root:
            self.release(lease)
        else:
            self._tree.unlease(lease.node, up_to=node, is_pin=lease.is_pin)
            lease.node = node

    def _within_budget(self, node: Node) -> Node | None:
        """The node where the part of the path ends that can be pinned; None if there is none.

        Splits the last node if only some of its pages fit.
        """
        room = self.max_pinned_pages - self._tree.pinned_pages
        path: list[Node] = []
        step: Node | None = node
        while step is not None and not step.pin_ref:
            path.append(step)
            step = step.parent
        kept = step
        for below in reversed(path):
            if len(below.pages) > room:
                if room > 0:
                    kept = self._tree.split(below, below.start + room * self._tree.page_size)
                break
            room -= len(below.pages)
            kept = below
        return None if kept is None or kept.is_root else kept

    def _compact(self) -> None:
        """Rebuild heaps in which most entries may belong to ended or changed leases."""
        if len(self._to_break) > 2 * len(self._active) + 64:
            self._to_break = [
                (key, lease) for lease, key in self._active.items() if not lease.is_pin
            ]
            heapify(self._to_break)
        if len(self._to_expire) > 2 * len(self._active) + 64:
            self._to_expire = [
                (lease.expires_s, key[2], lease) for lease, key in self._active.items()
            ]
            heapify(self._to_expire)
