"""What the tree's docstrings promise, one promise a test."""

from __future__ import annotations

import random
from array import array

import pytest

from stemma.radix.check import check
from stemma.radix.pages import PageAllocator
from stemma.radix.tree import Inserted, Match, Node, RadixTree


class Pool:
    """A tree and its pool, used the way a KV cache manager does."""

    def __init__(self, page_size: int = 1, num_pages: int = 256) -> None:
        self.tree = RadixTree(page_size)
        self.allocator = PageAllocator(num_pages)
        self.locks: list[Node] = []

    def insert(self, tokens: str, namespace: str = "") -> Inserted:
        pages = self.allocator.allocate(len(tokens) // self.tree.page_size)
        inserted = self.tree.insert(namespace, ids(tokens), pages)
        self.allocator.free(inserted.duplicate_pages)
        return inserted

    def extend(self, node: Node, tokens: str) -> Inserted:
        pages = self.allocator.allocate(len(tokens) // self.tree.page_size)
        inserted = self.tree.extend(node, ids(tokens), pages)
        self.allocator.free(inserted.duplicate_pages)
        return inserted

    def match(self, tokens: str, namespace: str = "", limit: int | None = None) -> Match:
        return self.tree.match(namespace, ids(tokens), limit)

    def length(self, tokens: str, namespace: str = "") -> int:
        return self.tree.match_length(namespace, ids(tokens))

    def lock(self, node: Node) -> None:
        self.tree.lock(node)
        self.locks.append(node)

    def unlock(self, node: Node) -> None:
        self.tree.unlock(node)
        self.locks.remove(node)

    def evict(self, num_pages: int) -> int:
        freed = self.tree.evict(num_pages)
        self.allocator.free(freed)
        return len(freed)

    def remove(self, node: Node, num_kept: int | None = None) -> int:
        freed = self.tree.remove(node, num_kept)
        self.allocator.free(freed)
        return len(freed)

    def check(self) -> None:
        check(self.tree, self.allocator, locks=self.locks)


def ids(tokens: str) -> list[int]:
    return [ord(char) for char in tokens]


def path(node: Node) -> str:
    tokens = ""
    step: Node | None = node
    while step is not None:
        tokens = "".join(map(chr, step.token_ids)) + tokens
        step = step.parent
    return tokens


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_match_finds_the_longest_prefix_and_ends_exactly_there(pool: Pool) -> None:
    given = pool.insert("abcdef")
    match = pool.match("abcxyz")
    assert (match.num_tokens, path(match.node)) == (3, "abc")
    assert match.pages == pool.match("abcdef").pages[:3]
    assert path(given.node) == "abcdef"
    pool.check()


def test_match_is_empty_when_nothing_is_known(pool: Pool) -> None:
    match = pool.match("abc")
    assert match.num_tokens == 0 and match.node.is_root and len(match.pages) == 0
    pool.check()


@pytest.mark.parametrize("limit", [-1, 0, 1, 5, 6, 7])
def test_match_stops_at_its_limit(pool: Pool, limit: int) -> None:
    pool.insert("abcdef")
    assert pool.match("abcdef", limit=limit).num_tokens == max(0, min(limit, 6))
    pool.check()


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 32, 33])
def test_only_whole_pages_enter_and_match(num_tokens: int) -> None:
    pool = Pool(page_size=16)
    tokens = "x" * num_tokens
    assert pool.insert(tokens).node.end == num_tokens // 16 * 16
    assert pool.match(tokens).num_tokens == num_tokens // 16 * 16
    assert pool.match(tokens + "y" * 16).num_tokens == num_tokens // 16 * 16
    pool.check()


def test_pages_that_share_only_their_beginning_are_siblings() -> None:
    pool = Pool(page_size=4)
    pool.insert("aaaaaaab")
    pool.insert("aaaaaaac")
    assert pool.match("aaaaaaac").num_tokens == 8
    assert pool.match("aaaaaaad").num_tokens == 4
    pool.check()


def test_namespaces_share_nothing(pool: Pool) -> None:
    pool.insert("abc", "base")
    assert pool.length("abc", "lora") == 0
    pool.insert("abc", "lora")
    assert pool.tree.num_pages == 6
    pool.check()


def test_match_length_changes_nothing(pool: Pool) -> None:
    pool.insert("abcdef")
    before = pool.tree.snapshot()
    assert pool.length("abcx") == 3 and pool.length("abc", "unknown") == 0
    assert pool.tree.snapshot() == before


def test_common_prefix_is_exact_for_every_length() -> None:
    generator = random.Random(1)
    run = array("i", (generator.randrange(1 << 31) for _ in range(300)))
    tree = RadixTree()
    tree.insert("", run, range(300))
    for length in range(300):
        other = run[:]
        other[length] ^= 1
        assert tree.match_length("", other) == length


def test_insert_keeps_the_trees_pages_and_returns_the_duplicates(pool: Pool) -> None:
    first = array("i", pool.allocator.allocate(3))
    pool.tree.insert("", ids("abc"), first)
    own = pool.allocator.allocate(5)
    inserted = pool.tree.insert("", ids("abcde"), own)
    assert inserted.num_existing == inserted.added_from == 3
    assert inserted.adopted_pages == first and inserted.duplicate_pages == own[:3]
    assert pool.match("abcde").pages == first + own[3:]
    pool.allocator.free(inserted.duplicate_pages)
    pool.check()


def test_pages_taken_from_a_match_are_no_duplicates(pool: Pool) -> None:
    pool.insert("abc")
    pages = pool.match("abcde").pages + pool.allocator.allocate(2)
    assert len(pool.tree.insert("", ids("abcde"), pages).duplicate_pages) == 0
    pool.check()


def test_a_tail_that_fills_no_page_stays_the_callers() -> None:
    pool = Pool(page_size=4)
    own = pool.allocator.allocate(3)
    pool.tree.insert("", ids("abcdefghij"), own)
    check(pool.tree, pool.allocator, held=[own[2:]])


def test_split_keeps_the_meaning_of_a_locked_handle(pool: Pool) -> None:
    lower = pool.insert("abcdef").node
    pool.lock(lower)
    upper = pool.match("abc").node
    assert path(lower) == "abcdef" and lower.parent is upper and upper.lock_ref == 1
    pool.lock(upper)
    pool.check()
    pool.unlock(lower)
    pool.check()
    assert pool.evict(99) == 3 and path(upper) == "abc"
    pool.check()


def test_evict_never_takes_locked_nodes(pool: Pool) -> None:
    pool.insert("abcdef")
    pool.insert("abcxyz")
    pool.lock(pool.match("abcd").node)
    assert pool.tree.evictable_pages == 5
    assert pool.evict(99) == 5
    assert pool.length("abcdef") == 4 and pool.length("abcxyz") == 3
    pool.check()


def test_evict_takes_the_least_recently_used_leaf_first(pool: Pool) -> None:
    for tokens in ("aaa", "bbb", "ccc"):
        pool.insert(tokens)
    pool.match("aaa")
    assert pool.evict(3) == 3
    assert [pool.length(tokens) for tokens in ("aaa", "bbb", "ccc")] == [3, 0, 3]
    assert pool.evict(3) == 3
    assert [pool.length(tokens) for tokens in ("aaa", "ccc")] == [3, 0]
    pool.check()


def test_unlock_is_a_use(pool: Pool) -> None:
    locked = pool.insert("aaa").node
    pool.lock(locked)
    pool.insert("bbb")
    pool.unlock(locked)
    pool.evict(3)
    assert pool.length("aaa") == 3 and pool.length("bbb") == 0
    pool.check()


def test_evict_takes_a_parent_once_it_is_a_leaf(pool: Pool) -> None:
    pool.insert("abcd")
    pool.insert("abxy")
    pool.insert("zzzz")
    assert pool.evict(6) == 6
    assert pool.length("abcd") == 0 and pool.length("zzzz") == 4
    pool.check()


def test_evict_trims_the_tail_of_the_last_leaf(pool: Pool) -> None:
    pool.insert("abcdef")
    pages = pool.match("abcdef").pages
    assert pool.tree.evict(2) == pages[4:]
    pool.allocator.free(pages[4:])
    assert pool.length("abcdef") == 4
    pool.check()


def test_evict_frees_what_there_is_when_asked_for_more(pool: Pool) -> None:
    pool.insert("abc")
    assert pool.evict(0) == 0 and pool.evict(99) == 3 and pool.evict(1) == 0
    assert not pool.tree.roots
    pool.check()


def test_extend_grows_in_place_under_the_callers_only_lock(pool: Pool) -> None:
    node = pool.insert("abc").node
    pool.lock(node)
    for token in "defg":
        inserted = pool.extend(node, token)
        assert inserted.node is node and inserted.num_existing == 0
        pool.tree.move_lock(node, inserted.node)
    assert pool.tree.num_nodes == 1 and inserted.added_from == 6
    pool.check()
    pool.unlock(node)
    pool.check()


def test_extend_makes_a_child_when_somebody_else_holds_the_node(pool: Pool) -> None:
    node = pool.insert("abc").node
    pool.lock(node)
    pool.lock(node)
    inserted = pool.extend(node, "def")
    assert inserted.node is not node and path(node) == "abc"
    pool.check()
    pool.tree.move_lock(node, inserted.node)
    pool.locks[0] = inserted.node
    pool.check()
    assert pool.extend(inserted.node, "g").node is inserted.node
    pool.check()


def test_extend_into_a_run_that_exists_adopts_it(pool: Pool) -> None:
    pool.insert("abcdef")
    node = pool.match("abc").node
    pool.lock(node)
    inserted = pool.extend(node, "dexy")
    assert (inserted.num_existing, inserted.added_from) == (2, 5)
    assert len(inserted.duplicate_pages) == 2 and path(inserted.node) == "abcdexy"
    pool.tree.move_lock(node, inserted.node)
    pool.locks[0] = inserted.node
    pool.check()


def test_extend_does_not_grow_a_leaf_that_another_request_holds(pool: Pool) -> None:
    leaf = pool.insert("abcdef").node
    pool.lock(leaf)
    node = pool.match("abc").node
    pool.lock(node)
    inserted = pool.extend(node, "defgh")
    assert path(leaf) == "abcdef" and inserted.node.parent is leaf
    pool.check()


def test_extend_without_a_lock_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="without being locked"):
        pool.extend(pool.insert("abc").node, "d")


def test_insert_grows_only_a_leaf_that_nobody_locks(pool: Pool) -> None:
    leaf = pool.insert("abc").node
    assert pool.insert("abcd").node is leaf
    pool.lock(leaf)
    assert pool.insert("abcde").node is not leaf and path(leaf) == "abcd"
    pool.check()


def test_a_handle_that_left_the_tree_cannot_be_locked(pool: Pool) -> None:
    node = pool.insert("abc").node
    pool.evict(3)
    with pytest.raises(AssertionError, match="left the tree"):
        pool.tree.lock(node)


def test_unlocking_too_often_is_refused(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="more often"):
        pool.tree.unlock(pool.insert("abc").node)


def test_an_empty_root_goes_with_its_last_lock(pool: Pool) -> None:
    root = pool.match("abc", "salt").node
    pool.lock(root)
    assert pool.evict(1) == 0 and "salt" in pool.tree.roots
    pool.unlock(root)
    assert not pool.tree.roots
    pool.check()


def test_remove_after_a_failed_step_takes_all_that_the_step_inserted(pool: Pool) -> None:
    pool.insert("abc")
    first = pool.insert("abcdefgh")
    pool.match("abcdex")
    second = pool.insert("abcdexyz")
    third = pool.insert("abcdexyz12")
    for inserted in (first, third, second):
        pool.remove(inserted.node, inserted.added_from)
    assert pool.length("abcdefgh") == 3 and pool.tree.num_pages == 3
    pool.check()


def test_remove_cuts_what_extend_grew_in_place(pool: Pool) -> None:
    node = pool.insert("abc").node
    pool.lock(node)
    earlier = pool.extend(node, "de")
    later = pool.extend(node, "fg")
    pool.unlock(node)
    assert pool.remove(later.node, later.added_from) == 2 and pool.length("abcdefg") == 5
    assert pool.remove(earlier.node, earlier.added_from) == 2 and pool.length("abcdefg") == 3
    assert pool.remove(earlier.node, earlier.added_from) == 0
    pool.check()


def test_remove_finds_its_tokens_above_a_split(pool: Pool) -> None:
    inserted = pool.insert("abcdef")
    pool.match("abc")
    assert pool.remove(inserted.node, inserted.added_from) == 6
    assert pool.tree.num_nodes == 0
    pool.check()


def test_remove_drops_a_node_and_all_below_it_by_default(pool: Pool) -> None:
    pool.insert("abcdef")
    pool.insert("abcxyz")
    pool.insert("q")
    assert pool.remove(pool.match("abc").node) == 9
    assert pool.length("q") == 1
    pool.check()


def test_remove_of_what_somebody_locks_is_refused_and_changes_nothing(pool: Pool) -> None:
    inserted = pool.insert("abcdef")
    pool.lock(pool.match("abc").node)
    before = pool.tree.snapshot()
    with pytest.raises(AssertionError, match="while locked"):
        pool.remove(inserted.node, 0)
    assert pool.tree.snapshot() == before
    assert pool.remove(inserted.node, 3) == 3
    pool.check()


def test_clear_drops_what_is_unlocked(pool: Pool) -> None:
    pool.insert("abcdef")
    pool.insert("zz", "other")
    pool.lock(pool.match("abc").node)
    pool.allocator.free(pool.tree.clear(""))
    assert pool.length("abcdef") == 3 and pool.length("zz", "other") == 2
    pool.check()
    pool.allocator.free(pool.tree.clear())
    assert pool.tree.num_pages == 3 and list(pool.tree.roots) == [""]
    pool.check()


def test_hits_count_matches_through_a_node(pool: Pool) -> None:
    pool.insert("abcdef")
    pool.match("abcdef")
    pool.match("abc")
    assert [row["hits"] for row in pool.tree.snapshot()] == [0, 2, 1]
