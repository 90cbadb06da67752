"""The host tier: KV evicted from the device, and the copies between the two.

A second radix tree with pages of its own, so that residency is prefix-closed on each tier by
construction and the device's tree has no extra cost. KV evicted from the device is first stored
here, with the ancestors that are missing; what a request finds here and not on the device is loaded
if that costs less than computing it. Of a model with recurrent layers KV is found as far as there
is a state behind it (state_cache.py).

Copies are `Transfer`s of the next plan, made in order before the step computes. So a page may be
evicted, stored, given away and loaded into within one plan: nothing here waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from ....radix.check import check
from ....radix.checkpoints import Checkpoint
from ....radix.leases import Lease, Leases
from ....radix.pages import PageAllocator, Pages
from ....radix.tree import Match, Node, RadixTree
from ...memory.copies import PageFork, TierCopy, Transfer
from ..plan import StepPlan, StepResult

MIN_LOADED_TOKENS = 16  # shorter runs are computed: a copy has a fixed cost (guess)
_MIN_MEASURED_TOKENS = 32
_MEMORY = 8  # steps


@dataclass(frozen=True, slots=True)
class InsertedPrefix:
    """An insert into a tree: the path to `node` from token `added_from` on."""

    node: Node
    added_from: int


class TierCosts:
    """Learns the seconds that a token takes to compute and to copy; until then assumes that copying
    is cheaper."""

    def __init__(self) -> None:
        self.compute_s: float | None = None
        self.copy_s: float | None = None

    def note(self, plan: StepPlan, result: StepResult, page_size: int) -> None:
        """Learn from a step's times."""
        copied = [len(t.device_pages) for t in plan.transfers if isinstance(t, Transfer)]
        num_copied = sum(copied) * page_size if len(copied) == len(plan.transfers) else 0
        if num_copied >= _MIN_MEASURED_TOKENS and result.transfer_s is not None:
            self.copy_s = _mean(self.copy_s, result.transfer_s / num_copied)
        if plan.num_tokens >= _MIN_MEASURED_TOKENS and result.duration_s is not None:
            longest = max(len(row.input_ids) for row in plan.rows)
            if 2 * longest > plan.num_tokens:  # a prompt, not a decode batch
                self.compute_s = _mean(self.compute_s, result.duration_s / plan.num_tokens)

    def can_pay(self, num_tokens: int) -> bool:
        """Whether so many tokens are better loaded than computed.

        Each refusal lowers the estimated copy cost, so that a bad measurement is not permanent.
        """
        if num_tokens < MIN_LOADED_TOKENS:
            return False
        if self.compute_s is None or self.copy_s is None or self.copy_s < self.compute_s:
            return True
        self.copy_s *= 0.9
        return False


class HostTier:
    """Owns the host's tree, its leases and page ids.

    Invariant, after every step: free + cached = `num_pages`; requests hold nothing here.
    """

    def __init__(self, num_pages: int, page_size: int, copies: list[TierCopy]) -> None:
        """`copies`: the list that collects the next plan's copies, in order."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(num_pages)
        self.leases = Leases(self.tree, 0)
        self.num_stored_tokens = 0  # since the start
        self.num_loaded_tokens = 0
        self._copies = copies
        self._unsettled: list[InsertedPrefix] = []  # from copies that no plan has taken yet

    def store(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        device_pages: Pages,
        owner: Hashable = None,
    ) -> int:
        """Copy what is missing of a path here, evicting what was used least; returns how many of
        its leading tokens are then here."""
        match = self.tree.match(namespace, token_ids)
        num_there = match.num_tokens // self.page_size
        pages = self._allocate(match.node, len(device_pages) - num_there)
        end = num_there + len(pages)
        if pages:
            run = token_ids[: end * self.page_size]
            inserted = self.tree.insert(namespace, run, match.pages + pages, owner=owner)
            self._unsettled.append(InsertedPrefix(inserted.node, inserted.added_from))
            self._copies.append(Transfer("store", device_pages[num_there:end], pages))
            self.num_stored_tokens += len(pages) * self.page_size
        return end * self.page_size

    def match(self, namespace: Hashable, token_ids: Sequence[int], limit: int) -> Match | None:
        """The cached part of a prefix here, None if empty; counts as a use."""
        if namespace not in self.tree.roots:
            return None
        if self.tree.checkpoints is not None:
            last = self.last_state(namespace, token_ids, limit)
            limit = 0 if last is None else last.position
        match = self.tree.match(namespace, token_ids, limit)
        return match if match.num_tokens else None

    def last_state(
        self, namespace: Hashable, token_ids: Sequence[int], limit: int
    ) -> Checkpoint | None:
        """The last state here behind at most `limit` tokens of a prefix."""
        states, root = self.tree.checkpoints, self.tree.roots.get(namespace)
        if states is None or root is None:
            return None
        path, end = self.tree.descend(root, token_ids[:limit])
        return states.deepest(reversed(path), end)

    def load(self, host_pages: Pages, device_pages: Pages) -> None:
        """Copy pages to the device."""
        self._copies.append(Transfer("load", device_pages, host_pages))
        self.num_loaded_tokens += len(host_pages) * self.page_size

    def retain(
        self, namespace: Hashable, token_ids: Sequence[int], like: Lease, before: Lease | None
    ) -> Lease | None:
        """Lease what is here of a prefix like `like` on the device, replacing `before`."""
        match = self.match(namespace, token_ids, len(token_ids))
        if match is None or (before is not None and before.num_kept_tokens >= match.num_tokens):
            return before
        if before is not None:
            self.leases.release(before)
        return self.leases.retain(
            match.node, due_s=like.due_s, expires_s=like.expires_s, priority=like.priority
        )

    def take_unsettled(self) -> tuple[InsertedPrefix, ...]:
        """The inserts that depend on the copies of the plan being made."""
        taken = tuple(self._unsettled)
        self._unsettled.clear()
        return taken

    def undo(self, unsettled: Iterable[InsertedPrefix]) -> None:
        """Remove the inserts of a failed plan."""
        for publication in unsettled:
            self.allocator.free(withdraw(self.tree, self.leases, publication))

    def flush(self) -> int:
        """Drop everything; returns the number of tokens dropped."""
        self.leases.release_all()
        freed = self.tree.clear()
        self.allocator.free(freed)
        return len(freed) * self.page_size

    def describe(self) -> dict[str, int]:
        """Size and counters as plain data."""
        return {
            "total_tokens": self.num_pages * self.page_size,
            "cached_tokens": self.tree.num_pages * self.page_size,
            "num_leases": len(self.leases),
            "stored_tokens": self.num_stored_tokens,
            "loaded_tokens": self.num_loaded_tokens,
        }

    def check(self) -> None:
        """Raises radix.check.CheckFailed when a page is lost or owned twice."""
        check(self.tree, self.allocator, (), (), self.leases.nodes())

    def _allocate(self, node: Node, num_pages: int) -> Pages:
        """`num_pages` pages, or as many as there are without evicting the path to `node`."""
        if num_pages <= 0:
            return array("i")
        short = num_pages - self.allocator.num_free
        if short > 0:
            self.tree.lock(node)
            if short > self.tree.evictable_pages:
                self.leases.give_up(short)
            self.allocator.free(self.tree.evict(short))
            self.tree.unlock(node)
        return self.allocator.allocate_at_most(num_pages)


def withdraw(tree: RadixTree, leases: Leases, publication: InsertedPrefix) -> Pages:
    """Remove an insert from a tree, and from its leases. It must not be locked; returns its pages
    to the caller."""
    node, kept = publication.node, publication.added_from
    while node.start > kept and node.parent is not None:
        node = node.parent
    if node.is_attached and node.end > kept:
        if node.start < kept:
            tree.split(node, kept)
        leases.withdraw(node)
        return tree.remove(node)
    return array("i")


def joined(copies: Sequence[TierCopy]) -> tuple[TierCopy, ...]:
    """Merges neighbouring transfers of one kind, unless they write a common page, and neighbouring
    forks, unless one writes what another reads or writes."""
    result: list[TierCopy] = []
    written: set[int] = set()
    for copy in copies:
        last = result[-1] if result else None
        if isinstance(copy, Transfer):
            targets = copy.host_pages if copy.kind == "store" else copy.device_pages
            is_like = isinstance(last, Transfer) and last.kind == copy.kind
            if isinstance(last, Transfer) and is_like and written.isdisjoint(targets):
                result[-1] = last._replace(
                    device_pages=last.device_pages + copy.device_pages,
                    host_pages=last.host_pages + copy.host_pages,
                )
                written.update(targets)
                continue
            written = set(targets)
        elif isinstance(copy, PageFork):
            if isinstance(last, PageFork) and _are_apart(last, copy, written):
                result[-1] = PageFork(last.sources + copy.sources, last.targets + copy.targets)
                written.update(copy.targets)
                continue
            written = set(copy.targets)
        result.append(copy)
    return tuple(result)


def _are_apart(fork: PageFork, other: PageFork, written: set[int]) -> bool:
    """Whether a fork, which writes `written`, and the one behind it may be made in any order."""
    if not (written.isdisjoint(other.sources) and written.isdisjoint(other.targets)):
        return False
    return set(fork.sources).isdisjoint(other.targets)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + (value - before) / _MEMORY
