"""The one door to KV pages: match, reserve, publish, release.

    a request's tokens   0 ....... num_published ....... num_computed ....... capacity
    their pages          |  the tree's (locked)  |      the request's own        |

A prompt chunk enters the tree when it is planned, so that later rows of the same step can already
read it; generated tokens enter when the request ends or is preempted. Where the tree already has a
run by then, the request's own pages for it are freed. A failed step's inserts are taken out again.
An entry of a page table never changes once it was sent, so a step in flight reads what was planned.

What programs know of their prefixes are leases (radix/leases.py): they decide what is evicted,
never what is computed, and give way to any request that needs the pages.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from ...radix.check import check
from ...radix.leases import Lease, Leases
from ...radix.pages import PageAllocator
from ...radix.tree import Node, NodeSnapshot, RadixTree
from ..request import Request

DEFAULT_PIN_SHARE = 0.25  # of the pool that pins may take (guess)


@dataclass(frozen=True, slots=True)
class KVCacheOptions:
    """What there is besides the device's pages."""

    has_leases: bool = True  # else retain and pin keep nothing
    pin_share: float = DEFAULT_PIN_SHARE
    num_host_pages: int = 0


@dataclass(frozen=True, slots=True)
class Publication:
    """What a plan put into the tree: the path to `node` from token `added_from` on."""

    node: Node
    added_from: int


class KVCacheManager:
    """Owns the tree, the leases on it and the pool's page ids.

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
        self.leases = Leases(self.tree, int(num_pages * self.options.pin_share))

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

    def begin_step(self) -> None:
        """A step is about to be planned: end the leases that have expired."""
        self.leases.expire(self.clock())

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
        node = self.tree.match(namespace, token_ids).node
        if node.is_root:
            return None
        now_s = self.clock()
        return self.leases.retain(
            node, due_s=now_s + due_s, expires_s=now_s + ttl_s, priority=priority
        )

    def pin(self, namespace: Hashable, token_ids: Sequence[int], *, ttl_s: float) -> Lease | None:
        """Pin what is cached of a prefix, as far as the budget allows; None where nothing is."""
        if not self.options.has_leases:
            return None
        node = self.tree.match(namespace, token_ids).node
        return None if node.is_root else self.leases.pin(node, expires_s=self.clock() + ttl_s)

    def release_lease(self, lease: Lease) -> None:
        """End a lease; nothing happens if it has ended."""
        self.leases.release(lease)

    # --- requests' pages --------------------------------------------------------------------------

    def attach(self, request: Request) -> None:
        """Match the request's tokens and lock what was found; it owns no pages yet."""
        match = self.tree.match(request.namespace, request.token_ids, request.match_limit)
        self.tree.lock(match.node)
        request.node = match.node
        request.pages = array("i", match.pages)
        request.num_published = request.num_computed_tokens = match.num_tokens
        request.num_sent_pages = 0

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
        self._make_room(missing)
        request.pages.extend(self.allocator.allocate(missing))

    def _make_room(self, num_pages: int, *, also_pins: bool = False) -> None:
        """Evict until `num_pages` are free, if that can be."""
        short = num_pages - self.allocator.num_free
        if short <= 0:
            return
        if short > self.tree.evictable_pages:
            self.leases.give_up(short, also_pins=also_pins)
        if short <= self.tree.evictable_pages:
            self.allocator.free(self.tree.evict(short))

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
        inserted = self.tree.extend(request.node, run, page_run)
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
        if keep:
            num_whole = request.num_computed_tokens // self.page_size - start
            tokens = request.token_ids[request.num_published :][: num_whole * self.page_size]
            inserted = self.tree.extend(request.node, tokens, own[:num_whole])
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
            if node.lease_ref or publication.node.lease_ref:  # rare, so all leases go
                self.leases.release_all()
            self.allocator.free(self.tree.remove(publication.node, kept))

    def flush(self) -> int:
        """Drop all that no request uses, leased or not; the number of tokens dropped."""
        self.leases.release_all()
        freed = self.tree.clear()
        self.allocator.free(freed)
        return len(freed) * self.page_size

    def snapshot(self, max_token_ids: int = 64) -> list[NodeSnapshot]:
        """The tree as plain data."""
        return self.tree.snapshot(max_token_ids)

    def check(self, requests: Iterable[Request]) -> None:
        """Raises radix.check.CheckFailed when a page is lost or owned twice."""
        running = [request for request in requests if request.node is not None]
        held = [r.pages[r.num_published // self.page_size :] for r in running]
        locks = [r.node for r in running if r.node is not None]
        check(self.tree, self.allocator, held, locks)
