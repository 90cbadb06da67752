"""Pages that begin with tokens that follow a match: found as a plain search finds them."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.radix.check import CheckFailed, check
from stemma.radix.pages import PageAllocator
from stemma.radix.tree import Node, RadixTree

PAGE_SIZE, NUM_PAGES = 4, 200
TOKENS = st.lists(st.sampled_from([1, 2, 256, -1]), max_size=18)


class Tree:
    def __init__(self) -> None:
        self.tree, self.allocator = RadixTree(PAGE_SIZE), PageAllocator(NUM_PAGES)

    def add(self, tokens: list[int]) -> Node | None:
        """All of them, what is less than a page as a tail; the tail, if it was added."""
        pages = self.allocator.allocate(-(-len(tokens) // PAGE_SIZE))
        num_whole = len(tokens) // PAGE_SIZE
        inserted = self.tree.insert("", tokens, pages[:num_whole])
        self.allocator.free(inserted.duplicate_pages)
        left = None
        if rest := array("i", tokens[num_whole * PAGE_SIZE :]):
            self.tree.lock(inserted.node)
            left = self.tree.add_tail(inserted.node, rest, pages[-1])
            if left is None:
                self.allocator.free(pages[-1:])
            self.tree.unlock(inserted.node)
        self.check()
        return left

    def num_shared(self, tokens: list[int]) -> int:
        """Tokens that are matched, and then found at the beginning of a page."""
        match = self.tree.match("", tokens)
        self.tree.lock(match.node)
        found = self.tree.begun_page(match.node, array("i", tokens[match.num_tokens :]))
        self.tree.unlock(match.node)
        self.check()
        return match.num_tokens + (0 if found is None else found[1])

    def check(self) -> None:
        check(self.tree, self.allocator, locks=())


def _num_common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@settings(max_examples=150, deadline=None)
@given(st.lists(TOKENS, max_size=12), st.lists(TOKENS, min_size=1, max_size=6))
def test_a_prefix_is_found_to_its_last_token(
    cached: list[list[int]], asked: list[list[int]]
) -> None:
    tree, known = Tree(), [list[int]()]
    for tokens in cached:
        assert tree.num_shared(tokens) == max(_num_common(tokens, each) for each in known)
        tree.add(tokens)
        known.append(tokens)
    for tokens in asked:
        assert tree.num_shared(tokens) == max(_num_common(tokens, each) for each in known)
    tree.allocator.free(tree.tree.evict(NUM_PAGES))
    tree.check()
    assert tree.allocator.num_free == NUM_PAGES


def test_tokens_that_a_page_begins_with_are_no_tail() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.add([1, 2, 3, 4, 5, 6]) is None
    assert tree.add([1, 2, 3, 4, 5, 9]) is not None
    assert tree.add([1, 2, 3, 4, 5]) is None and tree.tree.num_pages == 3


@pytest.mark.parametrize("goes_on", [[1, 2, 3], [1, 2, 3, 4]])
def test_a_tail_that_another_page_goes_on_from_is_evicted_first(goes_on: list[int]) -> None:
    tree = Tree()
    tree.add([7, 7, 7, 7])
    left = tree.add([1, 2])
    tree.add(goes_on)
    assert left is not None and tree.tree.use_order.oldest is left
    assert tree.num_shared([1, 2, 9]) == 2, "the other page begins with the same"
    assert tree.tree.use_order.oldest is left


def test_a_tail_is_cached_behind_its_path_and_leaves_with_it() -> None:
    tree = Tree()
    left = tree.add([1, 2, 3, 4, 5])
    assert left is not None and left.end == 5 and tree.tree.match_length("", [1, 2, 3, 4, 5]) == 4
    tree.allocator.free(tree.tree.remove(left, 0))
    tree.check()
    assert not left.is_attached and tree.tree.num_pages == 0


def test_begun_pages_are_searched_below_a_lock_only() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="without a lock"):
        tree.tree.begun_page(tree.tree.match("", [1, 2, 3, 4]).node, array("i", [5]))


def test_a_wrong_order_of_keys_is_found() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4])
    tree.num_shared([1, 2])
    root = tree.tree.roots[""]
    assert root.sorted_keys is not None
    root.sorted_keys.append(b"")
    with pytest.raises(CheckFailed, match="sorted keys"):
        tree.check()
