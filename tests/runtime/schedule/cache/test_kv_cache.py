"""The door to pages by itself: match, reserve, publish, release, and what a failure takes back."""

from __future__ import annotations

import random
from array import array

import pytest
from engine_harness import FAMILIES, EngineHarness, assert_right
from fakes import make_request

from stemma.errors import OutOfPages
from stemma.radix.check import CheckFailed
from stemma.runtime.memory.copies import PageFork
from stemma.runtime.schedule.cache.kv_cache import InsertedPrefix, KVCacheManager
from stemma.runtime.schedule.request import Request


class CacheHarness:
    """A manager and the requests that are attached to it, checked after every call."""

    def __init__(self, num_pages: int = 16, page_size: int = 1) -> None:
        self.cache = KVCacheManager(num_pages, page_size)
        self.attached: list[Request] = []

    def attach(self, *token_ids: int) -> Request:
        request = make_request(len(self.attached), token_ids)
        self.cache.attach(request)
        self.attached.append(request)
        self.check()
        return request

    def compute(self, request: Request, num_tokens: int) -> InsertedPrefix | None:
        """Reserve, publish and count as computed the first `num_tokens` tokens."""
        self.cache.reserve(request, num_tokens)
        self.check()
        publication = self.cache.publish(request, num_tokens)
        request.num_computed_tokens = num_tokens
        self.check()
        return publication

    def release(self, request: Request, *, keep: bool = True) -> None:
        self.cache.release(request, keep=keep)
        self.attached.remove(request)
        self.check()

    def check(self) -> None:
        self.cache.check(self.attached)


def test_what_was_published_is_matched_up_to_the_last_token() -> None:
    harness = CacheHarness()
    first = harness.attach(1, 2, 3, 4)
    harness.compute(first, 4)
    second = harness.attach(1, 2, 3, 4)
    assert second.num_computed_tokens == 3, "the last token's logits must be computed"
    assert second.pages == first.pages[:3]
    assert harness.attach(1, 2, 9).num_computed_tokens == 2
    assert harness.attach(9).num_computed_tokens == 0


def test_only_whole_pages_are_published_and_matched() -> None:
    harness = CacheHarness(page_size=4)
    first = harness.attach(*range(10))
    harness.compute(first, 10)
    assert first.num_published == 8 and len(first.pages) == 3
    assert harness.attach(*range(9)).num_computed_tokens == 8
    assert harness.attach(*range(8)).num_computed_tokens == 4


def test_reserving_evicts_what_nobody_uses() -> None:
    harness = CacheHarness(num_pages=4)
    old = harness.attach(1, 2, 3)
    harness.compute(old, 3)
    harness.release(old)
    assert harness.cache.allocator.num_free == 1 and harness.cache.num_free_pages == 4
    new = harness.attach(7, 8, 9)
    harness.compute(new, 3)
    assert harness.attach(1, 2, 3).num_computed_tokens == 1, "only what was needed is evicted"


def test_out_of_pages_changes_nothing() -> None:
    harness = CacheHarness(num_pages=4)
    first = harness.attach(1, 2)
    harness.compute(first, 2)
    cached = harness.attach(5)
    harness.compute(cached, 1)
    harness.release(cached)
    second = harness.attach(7, 8, 9)
    with pytest.raises(OutOfPages):
        harness.cache.reserve(second, 3)
    harness.check()
    assert len(second.pages) == 0 and harness.cache.num_free_pages == 2
    assert harness.attach(5, 6).num_computed_tokens == 1, "nothing was evicted in vain"


def test_a_request_adopts_what_another_published_meanwhile() -> None:
    harness = CacheHarness()
    first, second = harness.attach(1, 2, 3, 4), harness.attach(1, 2, 3, 5)
    harness.compute(first, 3)
    harness.cache.catch_up(second)
    harness.check()
    assert second.num_computed_tokens == 3 and second.pages == first.pages[:3]


def test_duplicates_are_freed_when_the_request_is_released() -> None:
    harness = CacheHarness(num_pages=16)
    first, second = harness.attach(1, 2, 3), harness.attach(1, 2, 3)
    harness.compute(first, 3)
    assert harness.compute(second, 3) is None, "the tree has it already"
    num_free = harness.cache.allocator.num_free
    harness.release(second)
    assert harness.cache.allocator.num_free == num_free + 3


def test_releasing_keeps_what_was_computed_and_frees_the_rest() -> None:
    harness = CacheHarness(num_pages=8, page_size=4)
    request = harness.attach(*range(6))
    harness.cache.prove([harness.compute(request, 6)])
    request.token_ids.extend([6, 7, 8, 9])
    harness.cache.reserve(request, 10)
    request.num_computed_tokens = 9
    harness.release(request)
    assert harness.cache.tree.num_pages == 3 and harness.cache.allocator.num_free == 5
    again = harness.attach(*range(12))
    assert again.num_computed_tokens == 8 and harness.cache.find_begun_page(again) is not None
    assert again.num_computed_tokens == again.copied_end == 9
    harness.release(again)
    request = harness.attach(*range(8), 20)
    harness.cache.reserve(request, 9)
    request.num_computed_tokens = 8
    harness.release(request)
    assert harness.cache.tree.num_pages == 3, "nothing was computed of the last page"
    assert request.pages == array("i") and request.node is None
    harness.cache.release(request)  # a second time is no error
    harness.check()


def test_a_prefix_goes_on_from_a_copy_of_the_page_that_begins_with_its_tokens() -> None:
    harness = CacheHarness(page_size=4)
    first = harness.attach(*range(10))
    publication = harness.compute(first, 10)
    second = harness.attach(0, 1, 2, 3, 4, 5, 20, 21)
    assert harness.cache.find_begun_page(second) is None, "no step has computed it yet"
    harness.cache.prove([publication])
    page = harness.cache.find_begun_page(second)
    assert page == first.pages[1] and second.num_computed_tokens == 6
    assert second.num_published == 4 and len(second.pages) == 1
    harness.cache.reserve(second, 8)
    harness.cache.fork_page(second, page)
    (fork,), _ = harness.cache.take_transfers()
    assert fork == PageFork(first.pages[1:2], second.pages[1:2])
    assert harness.cache.num_forked_tokens == 2
    harness.check()


def test_what_was_only_copied_is_not_cached_twice() -> None:
    harness = CacheHarness(page_size=4)
    first = harness.attach(*range(9))
    harness.cache.prove([harness.compute(first, 9)])
    second = harness.attach(0, 1, 2, 3, 4, 5, 20, 21)
    page = harness.cache.find_begun_page(second)
    harness.cache.reserve(second, 8)
    harness.cache.fork_page(second, page)
    num_pages = harness.cache.tree.num_pages
    harness.release(second)
    assert harness.cache.tree.num_pages == num_pages


def test_the_last_token_is_computed_also_where_a_page_has_it() -> None:
    harness = CacheHarness(page_size=4)
    harness.cache.prove([harness.compute(harness.attach(*range(8)), 8)])
    request = harness.attach(*range(6))
    assert harness.cache.find_begun_page(request) is not None
    assert request.num_computed_tokens == 5


@pytest.mark.parametrize("has_overlap", [False, True])
def test_as_much_is_computed_with_large_pages_as_with_small_ones(has_overlap: bool) -> None:
    """Calls one after the other that begin alike, of any length: each goes on from what it shares
    with one before, its output included, to the last token."""
    num_computed = []
    for page_size in (1, 4, 16):
        rng = random.Random(5)
        harness = EngineHarness(512, page_size, token_budget=64, has_overlap=has_overlap)
        texts = [FAMILIES[0][:37], FAMILIES[1][:5]]
        for _ in range(40):
            text = rng.choice(texts)
            prompt = text[: rng.randrange(1, len(text) + 1)]
            prompt += [rng.randrange(1, 30) for _ in range(rng.randrange(1, 20))]
            num_before = harness.executor.num_computed
            request = harness.submit(prompt, max_tokens=rng.randrange(1, 9))
            harness.run()
            assert_right(request)
            # What usage tells is right to the token: all but the last one are cached or computed.
            num_own = harness.executor.num_computed - num_before
            assert request.num_cached_tokens + num_own == request.num_tokens - 1
            texts.append([*request.token_ids])
        num_computed.append(harness.executor.num_computed)
        assert (harness.engine.describe()["forked_tokens"] > 0) == (page_size > 1)
        harness.assert_nothing_held()
    assert num_computed[0] == num_computed[1] == num_computed[2]


def test_unpublishing_takes_out_all_that_a_failed_step_put_in() -> None:
    harness = CacheHarness()
    before = harness.attach(1, 2)
    harness.compute(before, 2)
    first, second = harness.attach(1, 2, 3, 4, 5), harness.attach(1, 2, 3, 4, 6)
    published = [harness.compute(first, 5)]
    harness.cache.catch_up(second)
    assert second.num_computed_tokens == 4
    published.append(harness.compute(second, 5))
    for request in (first, second):
        harness.release(request, keep=False)
    harness.cache.unpublish(p for p in published if p is not None)
    harness.check()
    assert harness.attach(1, 2, 3, 4, 5).num_computed_tokens == 2


def test_unpublishing_spares_what_a_healthy_request_reads() -> None:
    harness = CacheHarness()
    bad, good = harness.attach(1, 2, 3, 4), harness.attach(1, 2, 9)
    publication = harness.compute(bad, 4)
    assert publication is not None
    harness.cache.catch_up(good)
    harness.compute(good, 3)
    harness.release(bad, keep=False)
    harness.cache.unpublish([publication])
    harness.check()
    assert harness.attach(1, 2, 3, 4, 5).num_computed_tokens == 2
    harness.release(good)


def test_flushing_drops_only_what_nobody_uses() -> None:
    harness = CacheHarness()
    request, gone = harness.attach(1, 2, 3), harness.attach(5, 6)
    harness.compute(request, 3)
    harness.compute(gone, 2)
    harness.release(gone)
    assert harness.cache.flush() == 2
    harness.check()
    assert harness.cache.tree.num_pages == 3


def test_the_check_notices_a_lost_page() -> None:
    harness = CacheHarness()
    request = harness.attach(1, 2, 3)
    harness.compute(request, 3)
    harness.cache.allocator.allocate(1)
    with pytest.raises(CheckFailed, match="belong to nobody"):
        harness.check()


def test_a_snapshot_of_a_large_tree_has_what_is_held_and_what_was_used_last() -> None:
    harness = EngineHarness(num_pages=4000)
    cache = harness.engine.scheduler.kv_cache
    drawn = random.Random(3)
    for _ in range(300):
        ids = [drawn.randrange(1, 8) for _ in range(8)]
        inserted = cache.tree.insert("", ids, cache.allocator.allocate(8))
        cache.allocator.free(inserted.duplicate_pages)
    oldest, newest = next(iter(cache.tree.use_order)), cache.tree.match("", ids).node
    few = cache.snapshot([oldest], max_nodes=20, max_token_ids=2)
    shown = {row["id"]: row for row in few}
    assert 20 <= len(few) <= 20 + 8 and {oldest.id, newest.id} <= set(shown)
    assert all(row["parent"] is None or row["parent"] in shown for row in few)
    assert all(len(row["token_ids"]) <= 2 for row in few)
    everything = cache.snapshot([], max_nodes=10_000, max_token_ids=2)
    assert {row["id"] for row in everything} == {node.id for node in cache.tree.nodes()}
