"""The one door to KV pages: match, reserve, publish, release.

    a request's tokens   0 ....... num_published ....... num_computed ....... capacity
    their pages          |  the tree's (locked)  |      the request's own        |

A prompt chunk enters the tree when it is planned, so that later rows of the same step can already
read it; generated tokens enter when the request ends or is preempted. Where the tree already has a
run by then, the request's own pages for it are freed. A failed step's inserts are taken out again.
An entry of a page table never changes once it was sent, so a step in flight reads what was planned.

What programs know of their prefixes are leases (radix/leases.py): they decide what is evicted,
never what is computed, and give way to any request that needs the pages. Behind the device's pages
there may be those of the host (tiers.py): what is evicted goes there, and comes back when a request
that begins so is admitted, or when a lease says that it is due. And there may be a store on disk
(stored_prefixes.py), which gets what is released, and keeps it over a restart.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ...radix.check import check
from ...radix.leases import Lease, Leases
from ...radix.pages import PageAllocator, Pages
from ...radix.tree import Node, NodeSnapshot, RadixTree
from ..request import Request
from ..step import BlockSave, StepPlan, StepResult, TierCopy
from .stored_prefixes import StoredPrefixes
from .tiers import HostTier, Publication, TierCosts, joined, withdraw

DEFAULT_PIN_SHARE = 0.25  # of the pool that pins may take (guess)
PREFETCH_AHEAD_S = 0.05  # before its use is a prefix loaded (guess)
MIN_EVICTED_TOKENS = 64  # at once, where they are copied to the host: one long copy, not many
PREEMPTED_TTL_S = 600.0  # a preempted request's KV is leased so long (guess)
PREEMPTED_PRIORITY = 1_000_000  # above all that programs may ask for
_UNOWNED = "(several)"  # the label of what no program has alone


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """What there is besides the device's pages."""

    has_leases: bool = True  # else retain and pin keep nothing
    pin_share: float = DEFAULT_PIN_SHARE
    num_host_pages: int = 0
    stored: StoredPrefixes | None = None  # on disk


class KVCacheManager:
    """Owns the tree, the leases on it and the pool's page ids, and the tiers behind.

    Invariant, after every step: free + cached + held by requests = `num_pages`.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        options: KVCacheOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds; leases end and are due by it."""
        self.options = options or KVCacheOptions()
        self.num_pages = num_pages
        self.page_size = page_size
        self.clock = clock
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(num_pages)
        max_pinned = int(num_pages * self.options.pin_share)
        num_host_pages = self.options.num_host_pages
        self._copies: list[TierCopy] = []  # for the next plan, in their order
        self.host = HostTier(num_host_pages, page_size, self._copies) if num_host_pages else None
        self.stored = self.options.stored
        at_once = min(MIN_EVICTED_TOKENS // page_size, num_pages // 32)
        self._min_evicted = at_once if num_host_pages else 0
        self.leases = Leases(self.tree, max_pinned, self._note_break if self.host else None)
        self.costs = TierCosts()
        self._broken: dict[Lease, tuple[Hashable, array[int]]] = {}  # with what they kept before
        self._to_prefetch: list[tuple[float, int, Lease]] = []  # when, a number
        self._num_prefetches = 0
        self._loads: list[Publication] = []  # of the plan in flight, or being made
        self._beneficiary: Request | None = None  # for whom pages are made free now

    @property
    def num_free_pages(self) -> int:
        """Pages that can be had without breaking a lease or preempting anybody."""
        return self.allocator.num_free + self.tree.evictable_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that can be had without preempting anybody or breaking a pin; perhaps a few more,
        since pins of what is locked anyhow are counted too."""
        num_unpinned = max(0, self.tree.leased_pages - self.tree.pinned_pages)
        return self.num_free_pages + num_unpinned

    @property
    def has_transfers(self) -> bool:
        """Whether a plan would have copies to make, if nothing else."""
        return bool(self._copies)

    def begin_step(self) -> None:
        """A step is about to be planned: end the leases that have expired, load what is due."""
        now_s = self.clock()
        self.leases.expire(now_s)
        if self.host is not None:
            self.host.leases.expire(now_s)
            self._prefetch_due(now_s)

    def take_transfers(self) -> tuple[TierCopy, ...]:
        """The copies between tiers that the plan now made must carry out first."""
        taken = joined(self._copies)
        self._copies.clear()
        return taken

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """The plan in flight was carried out."""
        if self.host is not None:
            self.costs.note(plan, result, self.page_size)
            self.host.settle()
        if self.stored is not None:
            self.stored.settle(_saves(plan), result.payloads)
        self._loads.clear()

    def undo_transfers(self, plan: StepPlan) -> None:
        """It failed, and its copies may not have been made; no request reads them any more."""
        if self.host is not None:
            self.host.undo()
        if self.stored is not None:
            self.stored.settle(_saves(plan), ())
        for load in self._loads:
            self.allocator.free(withdraw(self.tree, self.leases, load))
        self._loads.clear()

    # --- leases -----------------------------------------------------------------------------------

    def retain(
        self,
        namespace: Hashable,
        token_ids: Sequence[int],
        *,
        due_s: float,
        ttl_s: float,
        priority: int = 0,
    ) -> Lease | None:
        """Lease what is cached of a prefix that will be used again `due_s` from now; None where
        nothing is. It ends `ttl_s` from now at the latest."""
        if not self.options.has_leases:
            return None
        now_s = self.clock()
        lease = Lease(None, 0, now_s + due_s, now_s + ttl_s, priority)
        node = self._node_of(namespace, token_ids)
        if node is not None:
            self.leases.move(lease, node)
        if self.host is not None:
            lease.colder = self.host.retain(namespace, token_ids, lease, None)
            self._note_due(lease)
        return lease if lease.is_active else None

    def pin(self, namespace: Hashable, token_ids: Sequence[int], *, ttl_s: float) -> Lease | None:
        """Pin what is cached of a prefix on the device, as far as the budget allows; None where
        nothing is."""
        if not self.options.has_leases:
            return None
        node = self._node_of(namespace, token_ids)
        return None if node is None else self.leases.pin(node, expires_s=self.clock() + ttl_s)

    def update_lease(self, lease: Lease, *, due_s: float, ttl_s: float) -> None:
        """The use is expected `due_s` from now; nothing happens if the lease has ended."""
        due_s, expires_s = self.clock() + due_s, self.clock() + ttl_s
        self.leases.update(lease, due_s=due_s, expires_s=expires_s)
        if lease.colder is not None and self.host is not None:
            self.host.leases.update(lease.colder, due_s=due_s, expires_s=expires_s)
            lease.due_s, lease.expires_s = due_s, expires_s
            self._note_due(lease)

    def release_lease(self, lease: Lease, *, is_last_use: bool = False) -> None:
        """End a lease; nothing happens if it has ended. `is_last_use`: its program has ended, and
        what only that one has used is evicted before all else."""
        self.leases.release(lease, is_last_use=is_last_use)
        if lease.colder is not None and self.host is not None:
            self.host.leases.release(lease.colder, is_last_use=is_last_use)
            lease.colder = None

    def age(self, namespace: Hashable, token_ids: Sequence[int]) -> None:
        """A program has used this prefix for the last time: what only that one has used of it is
        evicted before all else."""
        node = self._node_of(namespace, token_ids) if self.options.has_leases else None
        if node is not None:
            self.tree.age(node)

    def give_way(self, namespace: Hashable, token_ids: Sequence[int]) -> None:
        """What the device has of this prefix, and nobody else goes on from, is evicted before all
        else."""
        node = self._node_of(namespace, token_ids)
        if node is not None:
            self.tree.age_path(node)

    def demote(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """Copy what the device has of a prefix to the host, then let it give way; how many of its
        tokens the host has."""
        assert self.host is not None, "there is no host tier"
        node = self._node_of(namespace, token_ids)
        if node is not None:
            self.host.store(namespace, *self.tree.path(node), node.owner)
            self.tree.age_path(node)
        return self.host.tree.match_length(namespace, token_ids)

    def share(self, namespace: Hashable, token_ids: Sequence[int]) -> int | None:
        """Keep what is cached of a prefix on disk, in whole blocks; how many tokens will be there,
        None without a store that can be written."""
        if self.stored is None or not self.stored.can_save:
            return None
        if namespace not in self.tree.roots:
            return 0
        match = self.tree.match(namespace, token_ids)
        cached = array("i", token_ids[: match.num_tokens])
        self._copies.extend(self.stored.saves(namespace, cached, match.pages))
        return self.stored.num_kept_tokens(namespace, cached)

    def keep_preempted(self, request: Request, token_ids: Sequence[int]) -> None:
        """A request was preempted: what it had computed is kept before all other content, until it
        is admitted again or ends."""
        request.lease = self.retain(
            request.namespace, token_ids, due_s=0.0, ttl_s=PREEMPTED_TTL_S,
            priority=PREEMPTED_PRIORITY,
        )  # fmt: skip

    def forget_preempted(self, request: Request) -> None:
        """It runs again, or has ended."""
        if request.lease is not None:
            self.release_lease(request.lease)
            request.lease = None

    def cached_tokens(self, namespace: Hashable, token_ids: Sequence[int]) -> int:
        """How many leading tokens are in the device's cache; changes nothing."""
        return self.tree.match_length(namespace, token_ids)

    # --- requests' pages --------------------------------------------------------------------------

    def attach(self, request: Request) -> None:
        """Match the request's tokens and lock what was found; it owns no pages yet."""
        match = self.tree.match(request.namespace, request.token_ids, request.match_limit)
        self.tree.lock(match.node)
        self.tree.note_user(match.node, request.program)
        request.node = match.node
        request.pages = array("i", match.pages)
        request.num_published = request.num_computed_tokens = match.num_tokens
        request.num_sent_pages = 0

    def load(self, request: Request) -> None:
        """Fetch what the host has of an attached request's tokens and the device has not, where
        that pays; the step that is being planned may read it."""
        if self.host is None or request.num_published != request.num_computed_tokens:
            return
        done = request.num_computed_tokens
        match = self.host.match(request.namespace, request.token_ids, request.match_limit)
        if match is None or not self.costs.can_pay(match.num_tokens - done):
            return
        assert request.node is not None
        self._beneficiary = request
        node, pages = self._load_below(request.node, match.node, request.program)
        self._beneficiary = None
        if pages:
            num_tokens = len(pages) * self.page_size
            self.tree.move_lock(request.node, node)
            request.node = node
            request.pages.extend(pages)
            request.num_published += num_tokens
            request.num_computed_tokens += num_tokens
            request.num_host_tokens += num_tokens

    def look_up(self, request: Request) -> bool:
        """Begin to fetch what only the store on disk has of a new request's tokens; whether the
        request is to be held back until `take_fetched` returns it."""
        if self.stored is None:
            return False
        namespace, token_ids, limit = request.namespace, request.token_ids, request.match_limit
        num_cached = 0
        if namespace in self.tree.roots:
            num_cached = self.tree.match_length(namespace, token_ids[:limit])
        on_host = None if self.host is None else self.host.match(namespace, token_ids, limit)
        if on_host is not None:
            num_cached = max(num_cached, on_host.num_tokens)
        return self.stored.look_up(request, num_cached)

    @property
    def has_fetched(self) -> bool:
        """Whether `take_fetched` would return any."""
        return self.stored is not None and self.stored.has_ready

    def take_fetched(self) -> list[Request]:
        """Requests that need wait no longer for what is fetched, in order of arrival."""
        return [] if self.stored is None else self.stored.take_ready()

    def forget_fetched(self, request: Request) -> None:
        """The request was admitted, or has ended."""
        if self.stored is not None:
            self.stored.forget(request)

    def restore(self, request: Request) -> None:
        """Put what was fetched of an attached request's tokens into its pages, as far as there are
        any; the step that is being planned may read it."""
        if self.stored is None or request.num_published != request.num_computed_tokens:
            return
        start = request.num_computed_tokens
        num_pages = (self.stored.restorable_end(request, start) - start) // self.page_size
        if num_pages <= 0:
            return
        self._beneficiary = request
        self._make_room(min(num_pages, self.num_available_pages))
        self._beneficiary = None
        pages = self.allocator.allocate(min(num_pages, self.allocator.num_free))
        if pages:
            end = start + len(pages) * self.page_size
            assert request.node is not None
            run = request.token_ids[start:end]
            inserted = self.tree.extend(request.node, run, pages, owner=request.program)
            assert not inserted.num_existing, "the device had what was fetched"
            self._loads.append(Publication(inserted.node, inserted.added_from))
            self.tree.move_lock(request.node, inserted.node)
            request.node = inserted.node
            request.pages.extend(pages)
            request.num_published = request.num_computed_tokens = end
            request.num_disk_tokens += end - start
            self._copies.extend(self.stored.restore(request, start, end))

    def catch_up(self, request: Request) -> None:
        """Adopt what others have published of the request's tokens since it was attached."""
        if request.num_published != request.num_computed_tokens:
            return
        done = request.num_computed_tokens
        if request.match_limit - done < self.page_size:
            return
        assert request.node is not None
        rest = request.token_ids[done:]
        match = self.tree.match_below(request.node, rest, request.match_limit - done)
        if match.num_tokens:
            self.tree.move_lock(request.node, match.node)
            self.tree.note_user(match.node, request.program)
            request.node = match.node
            request.pages.extend(match.pages)
            request.num_published += match.num_tokens
            request.num_computed_tokens += match.num_tokens

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Give the request pages for its first `num_tokens` tokens, evicting what nobody uses, then
        what is only leased.

        Raises OutOfPages when there are not enough; the request's own pages are then as before.
        """
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        if missing <= 0:
            return
        self._beneficiary = request
        self._make_room(missing)
        self._beneficiary = None
        request.pages.extend(self.allocator.allocate(missing))

    def break_pins(self, num_tokens: int) -> bool:
        """Free room for `num_tokens` tokens more, from pins too, as a live request would starve;
        whether that could be done."""
        num_pages = -(-num_tokens // self.page_size)
        self._make_room(num_pages, also_pins=True)
        return self.allocator.num_free >= num_pages

    def publish(self, request: Request, num_tokens: int) -> Publication | None:
        """Put whole pages of the first `num_tokens` tokens into the tree, unless it has them."""
        start, end = request.num_published, num_tokens - num_tokens % self.page_size
        assert request.node is not None
        run = request.token_ids[start:end]
        if not run or self.tree.match_length_below(request.node, run):
            return None
        page_run = request.pages[start // self.page_size : end // self.page_size]
        inserted = self.tree.extend(request.node, run, page_run, owner=request.program)
        self.tree.move_lock(request.node, inserted.node)
        request.node = inserted.node
        request.num_published = end
        return Publication(inserted.node, inserted.added_from)

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Take back all that the request holds; with `keep`, what it computed stays cached."""
        if request.node is None:
            return
        start = request.num_published // self.page_size
        own = request.pages[start:]
        if keep and self.stored is not None and request.is_admitted:
            done = request.token_ids[: request.num_computed_tokens]
            self._copies.extend(self.stored.saves(request.namespace, done, request.pages))
        if keep:
            num_whole = request.num_computed_tokens // self.page_size - start
            tokens = request.token_ids[request.num_published :][: num_whole * self.page_size]
            inserted = self.tree.extend(
                request.node, tokens, own[:num_whole], owner=request.program
            )
            self.allocator.free(inserted.duplicate_pages)
            own = own[num_whole:]
        self.allocator.free(own)
        self.tree.unlock(request.node)
        request.node = None
        request.pages = array("i")
        request.num_published = request.num_computed_tokens = request.num_sent_pages = 0

    def unpublish(self, publications: Iterable[Publication]) -> None:
        """Take inserts of a failed step out again, but for what a healthy request still reads."""
        for publication in publications:
            node, kept = publication.node, publication.added_from
            if node.lock_ref:
                continue
            while node.start > kept and node.parent is not None:
                if node.parent.lock_ref:
                    kept = node.start
                node = node.parent
            self.allocator.free(
                withdraw(self.tree, self.leases, Publication(publication.node, kept))
            )

    def flush(self) -> int:
        """Drop all that no request uses, leased or not, on every tier; the tokens dropped from the
        device."""
        self.leases.release_all()
        freed = self.tree.clear()
        self.allocator.free(freed)
        if self.host is not None:
            self.host.flush()
        return len(freed) * self.page_size

    def snapshot(self, max_token_ids: int = 64) -> list[NodeSnapshot]:
        """The tree as plain data."""
        return self.tree.snapshot(max_token_ids)

    def describe_leases(self) -> dict[str, int]:
        """How many leases there are, and what they keep, as plain data."""
        return {
            "num_leases": len(self.leases),
            "num_broken": self.leases.num_broken,
            "leased_tokens": self.tree.leased_pages * self.page_size,  # and not in use
            "pinned_tokens": self.tree.pinned_pages * self.page_size,
            "max_pinned_tokens": self.leases.max_pinned_pages * self.page_size,
        }

    def check(self, requests: Iterable[Request]) -> None:
        """Raises radix.check.CheckFailed when a page is lost or owned twice."""
        running = [request for request in requests if request.node is not None]
        held = [r.pages[r.num_published // self.page_size :] for r in running]
        locks = [r.node for r in running if r.node is not None]
        check(self.tree, self.allocator, held, locks, self.leases.nodes())
        if self.host is not None:
            self.host.check()

    # --- room, and what comes and goes for it -----------------------------------------------------

    def _node_of(self, namespace: Hashable, token_ids: Sequence[int]) -> Node | None:
        """What is cached of a prefix; None where nothing is."""
        if namespace not in self.tree.roots:
            return None
        node = self.tree.match(namespace, token_ids).node
        return None if node.is_root else node

    def _make_room(
        self, num_pages: int, *, due_after_s: float | None = None, also_pins: bool = False
    ) -> None:
        """Evict until `num_pages` are free, if that can be.

        `due_after_s`: at the cost of no lease that is due earlier.
        """
        short = num_pages - self.allocator.num_free
        if short <= 0:
            return
        if short > self.tree.evictable_pages:
            self.leases.give_up(short, due_after_s=due_after_s, also_pins=also_pins)
        if short <= self.tree.evictable_pages:
            short = max(short, self._min_evicted)
            self.allocator.free(self.tree.evict(short, self._note_eviction))
        self._follow_broken()

    def _note_eviction(self, leaf: Node, num_kept_pages: int) -> None:
        """A leaf is about to lose pages: they are counted, and first copied to the host unless they
        were used for the last time."""
        request = self._beneficiary
        if request is not None:
            label = _UNOWNED if leaf.owner is None else getattr(leaf.owner, "label", _UNOWNED)
            num_tokens = (len(leaf.pages) - num_kept_pages) * self.page_size
            request.evicted[label] = request.evicted.get(label, 0) + num_tokens
        if self.host is not None and leaf.last_use:
            self.host.store(leaf.namespace, *self.tree.path(leaf), leaf.owner)

    def _note_break(self, lease: Lease) -> None:
        """A lease is about to lose some of its end, which goes to the host."""
        if lease.node is not None and lease not in self._broken:
            self._broken[lease] = (lease.node.namespace, self.tree.path(lease.node)[0])

    def _follow_broken(self) -> None:
        """Leases go on keeping, on the host, what they had to give up here."""
        if self._broken and self.host is not None:
            for lease, (namespace, token_ids) in self._broken.items():
                lease.colder = self.host.retain(namespace, token_ids, lease, lease.colder)
                self._note_due(lease)
            self._broken.clear()

    def _load_below(self, node: Node, source: Node, owner: Hashable) -> tuple[Node, Pages]:
        """Load what the host's path to `source` has below the device's `node`, which is locked and
        part of it, as far as there are pages; the node where it ends, and the pages."""
        host = self.host
        assert host is not None
        token_ids, host_pages = host.tree.path(source)
        start = node.end // self.page_size
        num_pages = min(len(host_pages) - start, self.num_available_pages)
        host.tree.lock(source)  # making room here may make room there
        self._make_room(num_pages)
        host.tree.unlock(source)
        num_pages = min(num_pages, self.allocator.num_free)
        if num_pages <= 0:
            return node, array("i")
        end = start + num_pages
        pages = self.allocator.allocate(num_pages)
        run = token_ids[node.end : end * self.page_size]
        known = owner if source.owner is owner else None
        inserted = self.tree.extend(node, run, pages, owner=known)
        assert not inserted.num_existing, "the device had what was loaded"
        self._loads.append(Publication(inserted.node, inserted.added_from))
        host.load(host_pages[start:end], pages)
        return inserted.node, pages

    # --- loading before the use -------------------------------------------------------------------

    def _note_due(self, lease: Lease) -> None:
        """Load what only the host keeps of a lease's prefix shortly before it is due."""
        if _num_missing(lease):
            self._num_prefetches += 1
            when_s = lease.due_s - PREFETCH_AHEAD_S
            heappush(self._to_prefetch, (when_s, self._num_prefetches, lease))

    def _prefetch_due(self, now_s: float) -> None:
        while self._to_prefetch and self._to_prefetch[0][0] <= now_s:
            lease = heappop(self._to_prefetch)[2]
            is_due = lease.due_s - PREFETCH_AHEAD_S <= now_s < lease.expires_s
            if is_due and _num_missing(lease):
                self.prefetch_lease(lease)

    def prefetch_lease(self, lease: Lease) -> int:
        """Load what only the host keeps of a lease's prefix, at the cost of nothing that is due
        earlier; the number of tokens."""
        colder = lease.colder
        if self.host is None or colder is None or colder.node is None:
            return 0
        token_ids, _ = self.host.tree.path(colder.node)
        node, num_tokens = self.prefetch(colder.node.namespace, token_ids, lease.due_s)
        if node is not None and not lease.is_pin and node.end > lease.num_kept_tokens:
            self.leases.move(lease, node)
        return num_tokens

    def prefetch(
        self, namespace: Hashable, token_ids: Sequence[int], due_s: float
    ) -> tuple[Node | None, int]:
        """Load what only the host has of a prefix, as far as pages are free or held by leases that
        are due after `due_s`; where it then ends on the device, and the number of tokens loaded."""
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


def _saves(plan: StepPlan) -> list[BlockSave]:
    return [copy for copy in plan.transfers if isinstance(copy, BlockSave)]


def _num_missing(lease: Lease) -> int:
    """Tokens of a lease's prefix that only the host keeps."""
    return 0 if lease.colder is None else lease.colder.num_kept_tokens - lease.num_kept_tokens
