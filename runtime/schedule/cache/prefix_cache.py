"""Cached prefixes on all tiers: what is cached, what is evicted, and what is loaded back.

    device   radix tree and pages, which requests lock (kv_cache.py)
    host     a tree and pages of its own (tiers.py): what the device evicts goes there
    disk     whole blocks, also over a restart (stored_prefixes.py)

Leases (radix/leases.py) hold what programs know of their prefixes: they decide what is evicted,
never what is computed. A lease follows its prefix: what is evicted from the device stays leased on
the host, and shortly before it is due that part is loaded again.

Copies between tiers are collected for the next plan, which makes them in order before it computes
anything: a pending copy may refer to pages that are given away here.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from ....radix.checkpoints import Checkpoint
from ....radix.leases import Lease, Leases
from ....radix.owners import age_path
from ....radix.pages import PageAllocator, Pages
from ....radix.recent import recent_nodes
from ....radix.snapshot import NodeSnapshot, snapshot_of
from ....radix.tree import Node, RadixTree
from ...memory.copies import BlockSave, StateCopy, StateSave, TierCopy
from ..plan import StepPlan, StepResult
from ..request import Request
from .coming_prefixes import ComingPrefixes
from .state_cache import StateCache, StateOptions
from .stored_prefixes import StoredPrefixes
from .tiers import HostTier, InsertedPrefix, TierCosts, joined, withdraw

DEFAULT_PIN_SHARE = 0.25  # of the pool that pins may take (guess)
PREFETCH_AHEAD_S = 0.05  # a prefix is loaded so long before its use (guess)
MIN_EVICTED_TOKENS = 64  # at once, if they are copied to the host: one long copy, not many
_UNOWNED = "(several)"  # the label of what no single program owns


class PendingCopies(NamedTuple):
    """Inserts into a tree that depend on a plan's copies: removed if the plan fails."""

    loaded: tuple[InsertedPrefix, ...]  # on the device
    stored: tuple[InsertedPrefix, ...]  # on the host


_NO_TRANSFERS: tuple[tuple[TierCopy, ...], PendingCopies] = ((), PendingCopies((), ()))


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """Features besides the device's pages."""

    has_leases: bool = True  # False: retain and pin have no effect
    pin_share: float = DEFAULT_PIN_SHARE
    num_host_pages: int = 0
    stored: StoredPrefixes | None = None  # on disk
    coming: ComingPrefixes | None = None  # from other engines
    states: StateOptions | None = None  # set: the model has recurrent layers
    # Prefixes are shared to the last token: a page that others have begun is copied. A draft model
    # keeps its own KV by whole pages.
    shares_begun_pages: bool = True


class PrefixCache:
    """Owns the tree, its leases, the pool's page ids, and the colder tiers.

    Invariant: the device's pages are free, in the tree, or held by a request.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        options: KVCacheOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds, for the end and due time of leases."""
        self.options = options or KVCacheOptions()
        self.num_pages = num_pages
        self.page_size = page_size
        self.clock = clock
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(num_pages)
        max_pinned = int(num_pages * self.options.pin_share)
        num_host_pages = self.options.num_host_pages
        self.num_evicted_tokens = 0  # since the start
        self.num_forked_tokens = 0  # since the start: copied from pages that others had begun
        self._copies: list[TierCopy] = []  # for the next plan, in order
        self.host = HostTier(num_host_pages, page_size, self._copies) if num_host_pages else None
        self.states = self._state_cache(self.options.states)
        self.stored = self.options.stored
        self.coming = self.options.coming
        sources = (self.stored, self.coming)
        self._sources = tuple([source for source in sources if source is not None])
        at_once = min(MIN_EVICTED_TOKENS // page_size, num_pages // 32)
        self._min_evicted = at_once if num_host_pages else 0
        self.leases = Leases(self.tree, max_pinned, self._note_break if self.host else None)
        self.costs = TierCosts()
        self._broken: dict[Lease, tuple[Hashable, array[int]]] = {}  # with the prefix kept before
        self._to_prefetch: list[tuple[float, int, Lease]] = []  # (time, running number, lease)
        self._prefetch_at: dict[Lease, float] = {}  # the time of its valid entry there
        self._num_prefetches = 0
        self._loads: list[InsertedPrefix] = []  # of the next plan
        self._beneficiary: Request | None = None  # for which pages are being freed
        self._unproven: set[InsertedPrefix] = set()  # whose KV a plan is to write, or has failed to

    @property
    def num_free_pages(self) -> int:
        """Pages available without breaking a lease or preempting a request."""
        return self.allocator.num_free + self.tree.evictable_pages

    @property
    def num_available_pages(self) -> int:
        """Pages available without preempting a request or breaking a pin; perhaps a few more,
        since pins of locked pages are subtracted too."""
        num_unpinned = max(0, self.tree.leased_pages - self.tree.pinned_pages)
        return self.num_free_pages + num_unpinned

    @property
    def has_transfers(self) -> bool:
        """Whether a plan would have copies to make, even without rows."""
        return bool(self._copies) or (self.states is not None and self.states.has_saves)

    @property
    def is_plain(self) -> bool:
        """Whether it is the device's pages alone, with nothing to be copied."""
        is_alone = self.host is None and self.states is None and not self._sources
        return is_alone and not self._copies

    def _state_cache(self, options: StateOptions | None) -> StateCache | None:
        if options is None:
            return None
        if self.host is None:
            return StateCache(self.tree, options)
        return StateCache(self.tree, options, self.host, self._keep_state)

    def begin_step(self) -> None:
        """Called before a step is planned: end expired leases, load what is due."""
        now_s = self.clock()
        self.leases.expire(now_s)
        if self.host is not None:
            self.host.leases.expire(now_s)
            self._prefetch_due(now_s)

    def take_transfers(self) -> tuple[tuple[TierCopy, ...], PendingCopies]:
        """The copies between tiers that the plan being made must execute first."""
        if not self._copies:
            return _NO_TRANSFERS
        taken = joined(self._copies)
        self._copies.clear()
        loaded = tuple(self._loads)
        self._loads.clear()
        return taken, PendingCopies(loaded, () if self.host is None else self.host.take_unsettled())

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Record a plan's result."""
        if self.host is not None:
            self.costs.note(plan, result, self.page_size)
        if self.stored is not None:
            self.stored.settle(_saves(plan.transfers), result.payloads)
            self.stored.settle_states(_state_saves(plan.state_loads), result.state_payloads)

    def undo_states(
        self, copies: Sequence[StateCopy], checkpoints: Iterable[Checkpoint | None]
    ) -> None:
        """Undo a failed plan's copies of states, and end the checkpoints that it was to write."""
        if self.states is not None:
            self.states.drop(checkpoints)
        if self.stored is not None:
            self.stored.settle_states(_state_saves(copies), ())

    def undo_transfers(self, transfers: Sequence[TierCopy], unsettled: PendingCopies) -> None:
        """Undo a failed plan's copies, which may not have been made; no request reads them."""
        if self.host is not None:
            self.host.undo(unsettled.stored)
        if self.stored is not None:
            self.stored.settle(_saves(transfers), ())
        for load in unsettled.loaded:
            self.allocator.free(withdraw(self.tree, self.leases, load))

    # --- What programs know and say ---------------------------------------------------------------

    def retain(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        *,
        due_s: float,
        ttl_s: float,
        priority: int = 0,
    ) -> Lease | None:
        """Lease what is cached of a prefix that will be used again `due_s` from now, for at most
        `ttl_s`; None if nothing is cached."""
        if not self.options.has_leases:
            return None
        now_s = self.clock()
        lease = Lease(None, 0, now_s + due_s, now_s + ttl_s, priority)
        node = self._node_of(namespace, token_ids)
        if node is not None:
            self.leases.move(lease, node)
        if self.host is not None:
            lease.colder = self.host.retain(namespace, token_ids, lease, None)
            if lease.colder is not None:
                lease.num_tokens = max(lease.num_tokens, lease.colder.num_tokens)
            self._note_due(lease)
        return lease if lease.is_active else None

    def pin(self, namespace: Hashable, token_ids: Sequence[int], *, ttl_s: float) -> Lease | None:
        """Pin what is cached of a prefix on the device, as far as the budget allows; None if
        nothing is cached."""
        if not self.options.has_leases:
            return None
        node = self._node_of(namespace, token_ids)
        return None if node is None else self.leases.pin(node, expires_s=self.clock() + ttl_s)

    def update_lease(self, lease: Lease, *, due_s: float, ttl_s: float) -> None:
        """Expect the use `due_s` from now; does nothing if the lease has ended."""
        due_s, expires_s = self.clock() + due_s, self.clock() + ttl_s
        self.leases.update(lease, due_s=due_s, expires_s=expires_s)
        if lease.colder is not None and self.host is not None:
            self.host.leases.update(lease.colder, due_s=due_s, expires_s=expires_s)
            lease.due_s, lease.expires_s = due_s, expires_s
            self._note_due(lease)

    def release_lease(self, lease: Lease, *, is_last_use: bool = False) -> None:
        """End a lease; does nothing if it has ended. `is_last_use`: its program has ended, and what
        only that program has used is evicted before all else."""
        self.leases.release(lease, is_last_use=is_last_use)
        if lease.colder is not None and self.host is not None:
            self.host.leases.release(lease.colder, is_last_use=is_last_use)
            lease.colder = None
            self._prefetch_at.pop(lease, None)

    def give_way(self, namespace: Hashable, token_ids: Sequence[int]) -> None:
        """Evict the device's part of this prefix before all else, as far as no other sequence
        continues it."""
        node = self._node_of(namespace, token_ids)
        if node is not None:
            age_path(node, self.tree.use_order)

    def demote(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """Copy what has been computed of a prefix to the host, and evict it next on the device;
        returns how many of its tokens the host has."""
        assert self.host is not None, "there is no host tier"
        node = self._node_of(namespace, token_ids)
        if node is not None:
            self._copy_to_host(node, _states_above(node))
            age_path(node, self.tree.use_order)
        return self.host.tree.match_length(namespace, token_ids)

    def prefetch(
        self, namespace: Hashable, token_ids: Sequence[int], due_s: float
    ) -> tuple[Node | None, int]:
        """Load what only the host has of a prefix, as far as pages are free or leased with a due
        time after `due_s`. Returns its last node on the device, and the number of tokens loaded."""
        match = None if self.host is None else self.host.match(namespace, token_ids, len(token_ids))
        here = self.tree.match(namespace, token_ids)
        num_missing = 0 if match is None else match.num_tokens - here.num_tokens
        node, pages = here.node, array("i")
        if match is not None and num_missing > 0:
            self.tree.lock(here.node)
            num_pages = num_missing // self.page_size
            assert self.host is not None
            self.host.tree.lock(match.node)
            self._make_room(num_pages, due_after_s=due_s)
            self.host.tree.unlock(match.node)
            if self.allocator.num_free >= num_pages:
                node, pages = self._load_below(here.node, match.node, match.node.owner)
            self.tree.unlock(here.node)
        return (None if node.is_root else node), len(pages) * self.page_size

    def share(self, namespace: Hashable, token_ids: Sequence[int]) -> int | None:
        """Save what has been computed of a prefix to disk, in whole blocks. Returns how many of its
        tokens will be there; None without a writable store."""
        if self.stored is None or not self.stored.can_save:
            return None
        if namespace not in self.tree.roots:
            return 0
        match = self.tree.match(namespace, token_ids)
        cached = array("i", token_ids[: self._num_proven(match.node)])
        with_state = self._save(match.node, cached, match.pages)
        if with_state is not None:
            return with_state
        return self.stored.num_kept_tokens(namespace, cached)

    def _save(self, node: Node, token_ids: array[int], pages: Sequence[int]) -> int | None:
        """Save the whole blocks of these tokens, the proven ones of the path to a node, with the
        states behind them; returns how many of the tokens will be there with a state, None where
        the model has none."""
        assert self.stored is not None
        self._copies.extend(self.stored.saves(node.namespace, token_ids, pages))
        if self.states is None:
            return None
        states = [s for s in _states_above(node) if s.position <= len(token_ids)]
        saves, num_tokens = self.stored.state_saves(node.namespace, token_ids, states)
        self.states.save_blocks(saves)
        return num_tokens

    def flush(self) -> int:
        """Drop all that no request uses, leased or not, on every tier. Returns the number of tokens
        dropped from the device."""
        self.leases.release_all()
        freed = self.tree.clear()
        self.allocator.free(freed)
        if self.host is not None:
            self.host.flush()
        return len(freed) * self.page_size

    def snapshot(
        self, locked: Iterable[Node], *, max_nodes: int, max_token_ids: int
    ) -> list[NodeSnapshot]:
        """The device's tree as plain data, parents first, with what the host has of each node;
        `locked`: the nodes that requests hold. Beyond about `max_nodes` only the nodes held or used
        last."""
        leased = (lease.node for lease in self.leases if lease.node is not None)
        nodes = recent_nodes(self.tree, chain(locked, leased), max_nodes)
        rows = [snapshot_of(node, max_token_ids) for node in nodes]
        if self.host is not None:
            for row, node in zip(rows, nodes, strict=True):
                token_ids, _ = self.tree.path(node)
                on_host = self.host.tree.match_length(node.namespace, token_ids)
                row["host_tokens"] = max(0, on_host - node.start)
        return rows

    def describe_leases(self) -> dict[str, int]:
        """Counts of leases, and of leased and pinned tokens, as plain data."""
        return {
            "num_leases": len(self.leases),
            "num_broken": self.leases.num_broken,
            "leased_tokens": self.tree.leased_pages * self.page_size,  # and not in use
            "pinned_tokens": self.tree.pinned_pages * self.page_size,
            "max_pinned_tokens": self.leases.max_pinned_pages * self.page_size,
        }

    # --- Room, and what goes for it ---------------------------------------------------------------

    def _node_of(self, namespace: Hashable, token_ids: Sequence[int]) -> Node | None:
        """The node where the cached part of a prefix ends; None if nothing is cached."""
        if namespace not in self.tree.roots:
            return None
        node = self.tree.match(namespace, token_ids).node
        return None if node.is_root else node

    def _make_room(
        self, num_pages: int, *, due_after_s: float | None = None, also_pins: bool = False
    ) -> None:
        """Evict until `num_pages` are free, if possible.

        `due_after_s`: break no lease that is due earlier.
        """
        short = num_pages - self.allocator.num_free
        if short <= 0:
            return
        if short > self.tree.evictable_pages:
            wanted = short if also_pins else max(short, self._min_evicted)
            self.leases.give_up(wanted, due_after_s=due_after_s, also_pins=also_pins)
        if short <= self.tree.evictable_pages:
            short = max(short, self._min_evicted)
            freed = self.tree.evict(short, self._note_eviction)
            self.allocator.free(freed)
            self.num_evicted_tokens += len(freed) * self.page_size
        self._follow_broken()

    def _note_eviction(self, leaf: Node, num_kept_pages: int) -> None:
        """A leaf is about to lose pages: count them, and first copy them to the host unless they
        were used for the last time."""
        request = self._beneficiary
        if request is not None:
            label = _UNOWNED if leaf.owner is None else getattr(leaf.owner, "label", _UNOWNED)
            num_tokens = (len(leaf.pages) - num_kept_pages) * self.page_size
            request.evicted[label] = request.evicted.get(label, 0) + num_tokens
        if self.host is not None and leaf.last_use and not self.tree.is_tail(leaf):
            end = leaf.start + num_kept_pages * self.page_size
            self._copy_to_host(leaf, [state for state in _states_of(leaf) if state.position > end])

    def _keep_state(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is about to leave for another one: copy it to the host unless it was used
        for the last time."""
        node = checkpoint.node
        if node is not None and node.last_use:
            self._copy_to_host(node, [checkpoint])

    def _copy_to_host(self, node: Node, states: Sequence[Checkpoint] = ()) -> None:
        """Copy the path to a node, and states on it; of a model with recurrent layers no KV goes
        beyond the last of them."""
        assert self.host is not None
        token_ids, pages = self.tree.path(node)
        end = self._num_proven(node)
        if self.states is not None:
            end = min(end, max((state.position for state in states), default=0))
        if end:
            in_pages = pages[: end // self.page_size]
            num_there = self.host.store(node.namespace, token_ids[:end], in_pages, node.owner)
            for state in states:
                if self.states is not None and state.position <= num_there:
                    self.states.store(state, node.namespace, token_ids)

    def _num_proven(self, node: Node) -> int:
        """How many tokens of the path to `node` have their KV. What plans in flight are to write is
        cached already, but may never come: it must not reach another tier."""
        end = node.end
        path = set(_upwards(node)) if self._unproven else ()
        for insert in self._unproven:
            for step in _upwards(insert.node):
                if step.end <= insert.added_from:
                    break
                if step in path:
                    end = min(end, max(step.start, insert.added_from))
        return end

    def _unproven_below(self, node: Node) -> set[Node]:
        """The children of a node whose first page does not have its KV."""
        found = set()
        for insert in self._unproven:
            for step in _upwards(insert.node):
                if step.end <= insert.added_from:
                    break
                if step.parent is node:
                    found.add(step)
                    break
        return found

    def _note_break(self, lease: Lease) -> None:
        """A lease is about to lose part of its end, which goes to the host."""
        if lease.node is not None and lease not in self._broken:
            self._broken[lease] = (lease.node.namespace, self.tree.path(lease.node)[0])

    def _follow_broken(self) -> None:
        """Lease on the host what leases lost on the device."""
        if self._broken and self.host is not None:
            for lease, (namespace, token_ids) in self._broken.items():
                lease.colder = self.host.retain(namespace, token_ids, lease, lease.colder)
                self._note_due(lease)
            self._broken.clear()

    def _load_below(self, node: Node, source: Node, owner: Hashable) -> tuple[Node, Pages]:
        """Load the host's path to `source` below the device's `node`, which is locked and part of
        it, as far as there are pages; returns its last node, and the pages."""
        host = self.host
        assert host is not None
        token_ids, host_pages = host.tree.path(source)
        start = node.end // self.page_size
        num_pages = min(len(host_pages) - start, self.num_available_pages)
        host.tree.lock(source)  # freeing pages here may evict pages there
        self._make_room(num_pages)
        host.tree.unlock(source)
        pages = self.allocator.allocate_at_most(max(0, num_pages))
        if not pages:
            return node, pages
        end = start + len(pages)
        run = token_ids[node.end : end * self.page_size]
        known = owner if source.owner is owner else None
        inserted = self.tree.extend(node, run, pages, owner=known)
        assert not inserted.num_existing, "the device had what was loaded"
        self._loads.append(InsertedPrefix(inserted.node, inserted.added_from))
        host.load(host_pages[start:end], pages)
        return inserted.node, pages

    # --- Loading before the use -------------------------------------------------------------------

    def _note_due(self, lease: Lease) -> None:
        """Schedule the load of what only the host has of a lease's prefix, shortly before use."""
        when_s = lease.due_s - PREFETCH_AHEAD_S
        if _num_missing(lease) and self._prefetch_at.get(lease) != when_s:
            self._num_prefetches += 1
            self._prefetch_at[lease] = when_s
            heappush(self._to_prefetch, (when_s, self._num_prefetches, lease))

    def _prefetch_due(self, now_s: float) -> None:
        while self._to_prefetch and self._to_prefetch[0][0] <= now_s:
            when_s, _, lease = heappop(self._to_prefetch)
            if self._prefetch_at.get(lease) == when_s:
                del self._prefetch_at[lease]
                if now_s < lease.expires_s and _num_missing(lease):
                    self.prefetch_lease(lease)

    def prefetch_lease(self, lease: Lease) -> int:
        """Load what only the host has of a lease's prefix, without evicting anything due earlier;
        returns the number of tokens."""
        colder = lease.colder
        if self.host is None or colder is None or colder.node is None:
            return 0
        token_ids, _ = self.host.tree.path(colder.node)
        node, num_tokens = self.prefetch(colder.node.namespace, token_ids, lease.due_s)
        if node is not None and not lease.is_pin and node.end > lease.num_kept_tokens:
            self.leases.move(lease, node)
        return num_tokens


def _upwards(node: Node | None) -> Iterator[Node]:
    """The path from a node to its root."""
    while node is not None:
        yield node
        node = node.parent


def _states_of(node: Node) -> list[Checkpoint]:
    """Those that somebody could go on from."""
    return [state for state in (node.checkpoints or {}).values() if state.is_proven]


def _states_above(node: Node) -> list[Checkpoint]:
    """Those on the path to the end of a node."""
    return [state for step in _upwards(node) for state in _states_of(step)]


def _state_saves(copies: Sequence[StateCopy]) -> list[StateSave]:
    return [copy for copy in copies if isinstance(copy, StateSave)]


def _saves(transfers: Sequence[TierCopy]) -> list[BlockSave]:
    return [copy for copy in transfers if isinstance(copy, BlockSave)]


def _num_missing(lease: Lease) -> int:
    """Tokens of a lease's prefix that only the host has."""
    return 0 if lease.colder is None else lease.colder.num_kept_tokens - lease.num_kept_tokens
