"""The one door to KV pages: match, reserve, publish, release.

    a request's tokens   0 ....... num_published ....... num_computed ....... capacity
    their pages          |  the tree's (locked)  |      the request's own        |

A prompt chunk enters the tree when it is planned, so that later rows of the same step can already
read it; generated tokens enter when the request ends or is preempted. Where the tree already has a
run by then, the request's own pages for it are freed. A failed step's inserts are taken out again.
An entry of a page table never changes once it was sent, so a step in flight reads what was planned.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ...radix.check import check
from ...radix.pages import PageAllocator
from ...radix.tree import Node, NodeSnapshot, RadixTree
from ..request import Request


@dataclass(frozen=True, slots=True)
class Publication:
    """What a plan put into the tree: the path to `node` from token `added_from` on."""

    node: Node
    added_from: int


class KVCacheManager:
    """Owns the tree and the pool's page ids.

    Invariant, after every step: free + cached + held by requests = `num_pages`.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(num_pages)

    @property
    def num_free_pages(self) -> int:
        """Pages that can be had without preempting anybody."""
        return self.allocator.num_free + self.tree.evictable_pages

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
        """Give the request pages for its first `num_tokens` tokens, evicting what nobody uses.

        Raises OutOfPages, and has then changed nothing, when there are not enough.
        """
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        if missing <= 0:
            return
        short = missing - self.allocator.num_free
        if 0 < short <= self.tree.evictable_pages:
            self.allocator.free(self.tree.evict(short))
        request.pages.extend(self.allocator.allocate(missing))

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
            self.allocator.free(self.tree.remove(publication.node, kept))

    def flush(self) -> int:
        """Drop all that nobody uses; the number of tokens dropped."""
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
