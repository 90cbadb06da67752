"""The only access to KV pages: match, reserve, publish, release.

    a request's tokens   0 ....... num_published ....... num_computed ....... capacity
    their pages          |  the tree's (locked)  |      the request's own        |

A prompt chunk enters the tree when it is planned, so that later rows of the same step can already
read it; generated tokens enter when the request ends or is preempted. If the tree already has a run
by then, the request's own pages for it are freed. A failed step's inserts are removed again. A page
table entry never changes once sent, so a step in flight reads what was planned; pages of a request
that ends are returned when no step in flight refers to them (`FreedPages`).

Where a cached page begins with tokens that a request goes on with, it copies that page and goes on
from there (copy-on-write): a prefix is shared to its last token, whatever the page size. What a
request leaves of its last page is cached for that, as a tail of the tree.

prefix_cache.py manages cached KV that nobody reads, on this tier and the colder ones; what it keeps
for programs is evicted for any request that needs the pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ....errors import OutOfPages
from ....radix.check import check, check_checkpoints
from ....radix.owners import note_user
from ....radix.pages import Pages
from ....radix.tree import Node
from ...memory.copies import PageFork
from ..request import Request, RequestState
from .coming_prefixes import ComingPrefixes, Here
from .prefix_cache import DEFAULT_PIN_SHARE, KVCacheOptions, PrefixCache
from .stored_prefixes import StoredPrefixes
from .tiers import InsertedPrefix, withdraw

__all__ = ["DEFAULT_PIN_SHARE", "KVCacheManager", "KVCacheOptions", "InsertedPrefix"]

PREEMPTED_TTL_S = 600.0  # lease of a preempted request's KV (guess)
PREEMPTED_PRIORITY = 1_000_000  # above all that programs may request


class FreedPages(NamedTuple):
    """What a request that has ended leaves: its own pages, and a lock on what it read."""

    pages: Pages
    node: Node
    state_slot: int = 0  # 0: none


class KVCacheManager(PrefixCache):
    """The cached prefixes, and the pages that requests hold.

    Invariant, after every step: free + cached + held by requests = `num_pages`.
    """

    def attach(self, request: Request) -> None:
        """Match the request's tokens and lock what was found; it has no pages of its own yet."""
        match = self.tree.match(request.namespace, request.token_ids, request.match_limit)
        self.tree.lock(match.node)
        note_user(match.node, request.program)
        request.node = match.node
        request.pages = array("i", match.pages)
        request.num_published = match.num_tokens
        request.num_computed_tokens = request.num_scheduled_tokens = match.num_tokens
        request.num_sent_pages = 0

    def load(self, request: Request) -> None:
        """Load the attached request's tokens that the host has and the device has not, if that
        pays, a compressed prefix in any case: `has_compressed` said that it is there. The step
        being planned may read them."""
        if self.host is None:
            return
        match = self.host.match(request.namespace, request.token_ids, request.match_limit)
        if match is None or match.num_tokens <= request.num_published:
            return
        done = request.num_published if self.states is None else self.states.best(request)
        prefix = request.compressed
        must_load = prefix is not None and request.num_published < prefix.num_slots
        if not must_load and not self.costs.can_pay(match.num_tokens - done):
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
            request.num_scheduled_tokens += num_tokens
            request.num_host_tokens += num_tokens

    def restore(self, request: Request) -> None:
        """Copy what has arrived of an attached request's tokens, fetched or computed by another
        engine, into its pages, if there is any; the step being planned may read them."""
        if self.coming is not None:
            end = self.coming.restorable_end(request, request.num_published)
            self._restore_kv(request, self.coming, end)
        if self.stored is None:
            return
        if self.states is None:
            end = self.stored.restorable_end(request, request.num_published)
            num_before = request.num_published
            self._restore_kv(request, self.stored, end)
            request.num_disk_tokens += request.num_published - num_before
            return
        found = self.stored.restorable_state(request)
        if found is None or found[0] <= self.states.best(request):
            return
        end, payload = found
        if self.stored.restorable_end(request, request.num_published) >= end:
            num_before = request.num_published
            self._restore_kv(request, self.stored, end)
            request.num_disk_tokens += request.num_published - num_before
        assert request.node is not None
        if request.node.end >= end:
            self.states.restore(request.node, end, payload)
            self.stored.num_restored_states += 1

    def _restore_kv(
        self, request: Request, source: StoredPrefixes | ComingPrefixes, end: int
    ) -> None:
        """As far as there are pages."""
        start = request.num_published
        num_pages = (end - start) // self.page_size
        if num_pages <= 0:
            return
        self._beneficiary = request
        self._make_room(min(num_pages, self.num_available_pages))
        self._beneficiary = None
        pages = self.allocator.allocate_at_most(num_pages)
        if pages:
            end = start + len(pages) * self.page_size
            assert request.node is not None
            run = request.token_ids[start:end]
            inserted = self.tree.extend(request.node, run, pages, owner=request.program)
            assert not inserted.num_existing, "the device had what was fetched"
            self._loads.append(InsertedPrefix(inserted.node, inserted.added_from))
            self.tree.move_lock(request.node, inserted.node)
            request.node = inserted.node
            request.pages.extend(pages)
            request.num_published = request.num_computed_tokens = end
            request.num_scheduled_tokens = end
            self._copies.extend(source.restore(request, start, end))

    def find_begun_page(self, request: Request) -> int | None:
        """The cached page that begins with the most of an attached request's next tokens, if that
        is less than a page: these count as computed, and `fork_page` copies them. None: there is
        none, or the model has a state, which goes on from other places."""
        start = request.num_published
        num_wanted = min(request.match_limit - start, self.page_size)
        if not self._shares_begun_pages or num_wanted <= 0:
            return None
        assert request.node is not None
        if self._num_proven(request.node) < start:
            return None
        # What is still to be computed may be computed by the step being planned.
        run = request.token_ids[start : start + num_wanted]
        found = self.tree.begun_page(request.node, run, self._unproven_below(request.node))
        if found is None:
            return None
        request.copied_end = start + found[1]
        request.num_computed_tokens = request.num_scheduled_tokens = request.copied_end
        return found[0].pages[0]

    def fork_page(self, request: Request, source: int | None) -> None:
        """Copy what `find_begun_page` found to the first page of the request's own, before the step
        that is being planned. NOTE: pages may have been given away since, none has been written."""
        if source is not None:
            target = request.pages[request.num_published // self.page_size]
            self._copies.append(PageFork(array("i", [source]), array("i", [target])))
            self.num_forked_tokens += request.copied_end - request.num_published

    def begin_state(self, request: Request) -> None:
        """Give an attached request of a model with recurrent layers its live state: what is cached
        beyond that is computed again, for the state alone. Raises OutOfPages if there is no
        slot."""
        if self.states is not None:
            done = self.states.begin(request)
            request.num_computed_tokens = request.num_scheduled_tokens = done

    def catch_up(self, request: Request) -> None:
        """Adopt what other requests have published of the request's tokens since it was attached.
        If a plan in flight still computes tokens before these, they count as computed after it."""
        done = request.num_scheduled_tokens
        if request.num_published != done or self.states is not None:
            return
        if request.match_limit - done < self.page_size:
            return
        assert request.node is not None
        if not request.node.children:
            return
        rest = request.token_ids[done:]
        match = self.tree.match_below(request.node, rest, request.match_limit - done)
        if match.num_tokens:
            self.tree.move_lock(request.node, match.node)
            note_user(match.node, request.program)
            request.node = match.node
            request.pages.extend(match.pages)
            request.num_published += match.num_tokens
            request.num_scheduled_tokens += match.num_tokens
            if request.num_computed_tokens == done:
                request.num_computed_tokens += match.num_tokens

    def max_chunk(self, request: Request, budget: int) -> int:
        """What a step may compute of a request within `budget`: of a model with recurrent layers up
        to where a state is to be kept, of one that makes a compressed prefix up to its last
        chunk."""
        if request.compaction is not None and request.compaction.has_queries:
            num_before = request.compaction.first_observed - request.num_scheduled_tokens
            return min(budget, num_before) if num_before > 0 else budget
        return budget if self.states is None else self.states.cut(request, budget)

    def reserve(self, request: Request, num_tokens: int) -> None:
        """Give the request pages for its first `num_tokens` tokens. Evicts unused KV first, then
        KV that is only leased.

        Raises OutOfPages if there are not enough; the request's own pages are then unchanged.
        """
        missing, kept = self._num_missing_pages(request, num_tokens)
        if missing + kept > self.allocator.num_free:
            self._beneficiary = request
            self._make_room(missing + kept)
            self._beneficiary = None
        pages = self.allocator.allocate(missing + kept)
        request.pages.extend(pages[:missing])
        if kept:
            assert request.compaction is not None
            request.compaction.pages = pages[missing:]

    def reserve_free(self, requests: Iterable[Request]) -> None:
        """The same for all that is scheduled of each, as if the executor had been told; there are
        enough free pages."""
        page_size, allocate = self.page_size, self.allocator.allocate
        for request in requests:
            pages = request.pages
            missing = -(-request.num_scheduled_tokens // page_size) - len(pages)
            if missing > 0:
                pages.extend(allocate(missing))
            request.num_sent_pages = len(pages)

    def _num_missing_pages(self, request: Request, num_tokens: int) -> tuple[int, int]:
        """For its first tokens up to there, and for the compressed prefix that a chunk up to there
        makes."""
        missing = max(0, -(-num_tokens // self.page_size) - len(request.pages))
        compaction = request.compaction
        if compaction is None or compaction.pages or num_tokens < request.num_tokens:
            return missing, 0
        return missing, compaction.prefix.num_slots // self.page_size

    def has_compressed(self, request: Request) -> bool:
        """Whether all of a request's compressed prefix is cached, here or on the host."""
        prefix = request.compressed
        assert prefix is not None
        here = 0
        if request.namespace in self.tree.roots:
            here = self.tree.match_length(request.namespace, prefix.ids)
        if here < prefix.num_slots and self.host is not None:
            match = self.host.match(request.namespace, prefix.ids, prefix.num_slots)
            here = 0 if match is None else match.num_tokens
        return here >= prefix.num_slots

    def publish_compressed(self, request: Request) -> None:
        """Insert the compressed prefix that a request has made."""
        compaction = request.compaction
        assert compaction is not None and compaction.pages, "its last chunk was computed"
        pages, compaction.pages = compaction.pages, array("i")
        ids = compaction.prefix.ids
        inserted = self.tree.insert(request.namespace, ids, pages, owner=request.program)
        self.allocator.free(inserted.duplicate_pages)

    def reserve_for_drafts(self, request: Request, num_tokens: int) -> bool:
        """Like `reserve`, but for guesses nothing that is leased is evicted; whether there was
        room."""
        missing = -(-num_tokens // self.page_size) - len(request.pages)
        if missing > self.num_free_pages:
            return False
        try:
            self.reserve(request, num_tokens)
        except OutOfPages:  # free by the count, and yet not to be had
            return False
        return True

    def trim(self, request: Request, num_ahead: int = 0) -> None:
        """Free the pages beyond the request's tokens and so many more, which only rejected drafts
        used. NOTE: no plan in flight names them."""
        num_pages = -(-(request.num_tokens + num_ahead) // self.page_size)
        if len(request.pages) > num_pages:
            self.allocator.free(request.pages[num_pages:])
            del request.pages[num_pages:]
            request.num_sent_pages = min(request.num_sent_pages, num_pages)

    def exchange(
        self,
        request: Request,
        pairs: Sequence[tuple[int, int]],
        told: Sequence[tuple[int, int]],
        first: int,
    ) -> None:
        """Exchange entries of the request's page table, from `first` on: pages of one token of a
        branch for those at its position. The executor has done so with the pairs `told`."""
        pages = request.pages
        for entry, other in pairs:
            pages[entry], pages[other] = pages[other], pages[entry]
        if pairs != told:
            request.num_sent_pages = min(request.num_sent_pages, first)

    def break_pins(self, request: Request, num_tokens: int) -> bool:
        """Free room for all that `reserve` would take, evicting pins too, so that a live request
        does not starve; whether it succeeded."""
        num_pages = sum(self._num_missing_pages(request, num_tokens))
        self._make_room(num_pages, also_pins=True)
        return self.allocator.num_free >= num_pages

    def publish(self, request: Request, num_tokens: int) -> InsertedPrefix | None:
        """Insert whole pages of the first `num_tokens` tokens into the tree, unless it has them;
        they count as unproven until `prove`."""
        if request.encoding is not None:  # what a token is depends on those behind it
            return None
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
        publication = InsertedPrefix(inserted.node, inserted.added_from)
        self._unproven.add(publication)
        return publication

    def publish_computed(self, request: Request) -> None:
        """Insert all whole pages that a running request has computed; for tokens that the tree has
        by now the request goes on with the tree's pages. No plan in flight names the request."""
        start = request.num_published
        end = request.num_computed_tokens - request.num_computed_tokens % self.page_size
        if end <= start:
            return
        assert request.node is not None
        first, last = start // self.page_size, end // self.page_size
        inserted = self.tree.extend(
            request.node,
            request.token_ids[start:end],
            request.pages[first:last],
            owner=request.program,
        )
        self.tree.move_lock(request.node, inserted.node)
        request.node = inserted.node
        request.num_published = end
        if inserted.duplicate_pages:
            self.allocator.free(inserted.duplicate_pages)
            num_adopted = len(inserted.adopted_pages)
            request.pages[first : first + num_adopted] = inserted.adopted_pages
            request.num_sent_pages = min(request.num_sent_pages, first)

    def can_adopt(self, source: Request) -> bool:
        """Whether `adopt` may be called once the source has published what it has computed: a
        recurrent state is that behind all of it."""
        return self.states is None or source.num_computed_tokens % self.page_size == 0

    def adopt(self, request: Request, source: Request) -> None:
        """Have a running request read what another has published, in place of all that it has; its
        tokens begin like those. No plan in flight names either."""
        assert source.node is not None
        self.tree.lock(source.node)
        before, num_sent = request.pages, request.num_sent_pages
        self.release(request, keep=False)
        end = source.num_published
        request.node = source.node
        request.pages = source.pages[: end // self.page_size]
        request.num_published = request.num_computed_tokens = request.num_scheduled_tokens = end
        if self.states is not None:
            self.states.copy_live(request, source)
        elif self._shares_begun_pages and source.num_computed_tokens > end:
            self._fork_last_page(request, source)
        same = min(num_sent, len(request.prompt) // self.page_size)
        request.num_sent_pages = same if before[:same] == request.pages[:same] else 0

    def _fork_last_page(self, request: Request, source: Request) -> None:
        """Copy what a running request has computed beyond its last whole page, if there is room."""
        self._make_room(1)
        target = self.allocator.allocate_at_most(1)
        if target:
            first = source.num_published // self.page_size
            self._copies.append(PageFork(source.pages[first : first + 1], target))
            self.num_forked_tokens += source.num_computed_tokens - source.num_published
            request.pages.extend(target)
            request.copied_end = source.num_computed_tokens
            request.num_computed_tokens = request.num_scheduled_tokens = request.copied_end

    def prove(self, publications: Iterable[InsertedPrefix | None]) -> None:
        """The plan that was to write these has done so."""
        self._unproven.difference_update(publications)

    def suspect(self, publications: Iterable[InsertedPrefix]) -> None:
        """These were not written, and cannot be unpublished yet."""
        self._unproven.update(publications)

    def release(self, request: Request, *, keep: bool = True) -> None:
        """Free all that the request holds; with `keep`, the KV that it computed stays cached."""
        remains = self.detach(request, keep=keep)
        if remains is not None:
            self.give_back(remains)

    def detach(self, request: Request, *, keep: bool = True) -> FreedPages | None:
        """Like `release`, except for what plans in flight may use: the caller gives that back."""
        node = request.node
        if node is None:
            return None
        keep = keep and request.encoding is None
        start = request.num_published // self.page_size
        own = request.pages[start:]
        unused = array("i")
        if request.compaction is not None:
            unused, request.compaction.pages = request.compaction.pages, unused
        if keep and self.stored is not None and request.state is RequestState.RUNNING:
            num_proven = self._num_proven(node)
            end = request.num_computed_tokens if num_proven == node.end else num_proven
            self._save(node, request.token_ids[:end], request.pages)
        num_whole = request.num_computed_tokens // self.page_size - start
        if keep and num_whole > 0:
            tokens = request.token_ids[request.num_published :][: num_whole * self.page_size]
            inserted = self.tree.extend(node, tokens, own[:num_whole], owner=request.program)
            self.tree.move_lock(node, inserted.node)
            node = inserted.node
            own = inserted.duplicate_pages + own[num_whole:]
        if keep and self._has_tail(request):
            first = node.end
            tail = request.token_ids[first : request.num_computed_tokens]
            page = request.pages[first // self.page_size]
            left = self.tree.add_tail(node, tail, page, owner=request.program)
            if left is not None:
                own.remove(page)
                self.tree.move_lock(node, left)
                node = left
        state_slot = self._detach_state(request, node, keep=keep)
        request.node = None
        request.pages = array("i")
        request.num_published = request.num_computed_tokens = 0
        request.num_scheduled_tokens = request.num_sent_pages = request.copied_end = 0
        return FreedPages(own + unused, node, state_slot)

    @property
    def _shares_begun_pages(self) -> bool:
        """A page of one token is never begun; a model's state goes on from other places."""
        may_share = self.options.shares_begun_pages and self.states is None
        return may_share and self.page_size > 1

    def _has_tail(self, request: Request) -> bool:
        """Whether it has computed a part of a page that it leaves: more of it than was copied."""
        end = request.num_computed_tokens
        is_own = end > max(request.num_published, request.copied_end)
        return self._shares_begun_pages and is_own and end % self.page_size > 0

    def _detach_state(self, request: Request, node: Node, *, keep: bool) -> int:
        """Take a leaving request's live slot; with `keep`, what it holds stays as a checkpoint,
        where nobody computes it any further. Returns the slot that is to be given back, or 0."""
        slot, request.state_slot = request.state_slot, 0
        position = request.num_computed_tokens
        if self.states is None or not slot or not keep or request.num_scheduled_tokens != position:
            return slot
        return 0 if self.states.hand_over(node, position, slot) else slot

    def give_back(self, remains: FreedPages) -> None:
        """Free these; no plan in flight refers to them any more."""
        self.allocator.free(remains.pages)
        self.tree.unlock(remains.node)
        if remains.state_slot and self.states is not None:
            self.states.checkpoints.free(remains.state_slot)

    def unpublish(self, publications: Iterable[InsertedPrefix]) -> None:
        """Remove inserts of a failed step, except for what a healthy request still reads."""
        for publication in publications:
            self._unproven.discard(publication)
            node, kept = publication.node, publication.added_from
            if node.lock_ref:
                continue
            while node.start > kept and node.parent is not None:
                if node.parent.lock_ref:
                    kept = node.start
                node = node.parent
            self.allocator.free(
                withdraw(self.tree, self.leases, InsertedPrefix(publication.node, kept))
            )

    # --- Requests that wait -----------------------------------------------------------------------

    def keep_preempted(self, request: Request, token_ids: Sequence[int]) -> None:
        """Lease a preempted request's computed KV, above all other content, until it is admitted
        again or ends."""
        request.lease = self.retain(
            request.namespace, token_ids, due_s=0.0, ttl_s=PREEMPTED_TTL_S,
            priority=PREEMPTED_PRIORITY,
        )  # fmt: skip

    def forget_preempted(self, request: Request) -> None:
        """The request runs again, or has ended: release its lease."""
        if request.lease is not None:
            self.release_lease(request.lease)
            request.lease = None

    def look_up(self, request: Request, here: Here) -> bool:
        """Start to fetch tokens of a new request that only the disk store has, or that another
        engine is to compute; whether the request must wait until `take_fetched` returns it."""
        if self.stored is None and self.coming is None:
            return False
        namespace, token_ids, limit = request.namespace, request.token_ids, request.match_limit
        num_cached = 0
        if namespace in self.tree.roots:
            num_cached = self.tree.match_length(namespace, token_ids[:limit])
        on_host = None if self.host is None else self.host.match(namespace, token_ids, limit)
        if on_host is not None:
            num_cached = max(num_cached, on_host.num_tokens)
        known = None if self.states is None else self.states.known(request)
        if self.stored is not None and self.stored.look_up(request, num_cached, known):
            return True
        if self.coming is None or self.states is not None:
            return False
        return self.coming.look_up(request, num_cached, here)

    @property
    def num_held(self) -> int:
        """Requests that wait for a fetch."""
        return sum(source.num_held for source in self._sources)

    @property
    def has_fetched(self) -> bool:
        """Whether `take_fetched` would return any."""
        return any(source.has_ready for source in self._sources)

    def take_fetched(self) -> list[Request]:
        """Requests that no longer wait for a fetch, of each source in order of arrival."""
        return [request for source in self._sources for request in source.take_ready()]

    def forget_fetched(self, request: Request) -> None:
        """Drop the fetched blocks of a request that was admitted or has ended."""
        for source in self._sources:
            source.forget(request)

    def check(self, requests: Iterable[Request], remains: Sequence[FreedPages] = ()) -> None:
        """Raises radix.check.CheckFailed when a page is lost or owned twice."""
        running = [request for request in requests if request.node is not None]
        held = [r.pages[r.num_published // self.page_size :] for r in running]
        held += [r.compaction.pages for r in running if r.compaction is not None]
        locks = [r.node for r in running if r.node is not None]
        held += [left.pages for left in remains]
        locks += [left.node for left in remains]
        check(self.tree, self.allocator, held, locks, self.leases.nodes())
        if self.host is not None:
            self.host.check()
        if self.states is not None:
            slots = [r.state_slot for r in running if r.state_slot]
            slots += [left.state_slot for left in remains if left.state_slot]
            check_checkpoints(self.states.checkpoints, self.tree, slots)
            if self.states.host is not None and self.host is not None:
                check_checkpoints(self.states.host, self.host.tree, ())
