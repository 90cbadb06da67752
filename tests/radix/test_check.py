"""Each invariant, broken on purpose: `check` must say what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stemma.radix.check import CheckFailed, check
from stemma.radix.pages import PageAllocator
from stemma.radix.tree import Node, RadixTree


def build() -> tuple[RadixTree, PageAllocator, Node]:
    """Three branches, "abcd" locked at its end; 8 pages cached, 4 free, none held."""
    tree, allocator = RadixTree(), PageAllocator(12)
    for tokens in ("abcd", "abxy", "zz"):
        match = tree.match("", [ord(char) for char in tokens])
        pages = match.pages + allocator.allocate(len(tokens) - match.num_tokens)
        tree.insert("", [ord(char) for char in tokens], pages)
    locked = tree.match("", [ord(char) for char in "abcd"]).node
    tree.lock(locked)
    return tree, allocator, locked


def test_check_passes_on_a_sound_tree() -> None:
    tree, allocator, locked = build()
    check(tree, allocator, locks=[locked])


def drop_page(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    allocator.allocate(1)


def free_cached_page(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    allocator.free(locked.pages[:1])


def lose_lock(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    assert locked.parent is not None
    locked.parent.lock_ref = 0


def miscount(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    tree.evictable_pages += 1


def misfile(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    locked.token_ids[0] += 1


def rename(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    locked.key = b"another"


def shorten(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    locked.pages.pop()


def forget_use(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    oldest = tree.use_order.oldest
    assert oldest is not None
    tree.use_order.drop(oldest)


def offer_locked(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    tree.use_order.put(locked)


def reorder(tree: RadixTree, allocator: PageAllocator, locked: Node) -> None:
    oldest = tree.use_order.oldest
    assert oldest is not None
    tree.use_order.drop(oldest)
    tree.use_order.put(oldest)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_page, "1 pages belong to nobody"),
        (free_cached_page, "page .* belongs to the free list and <Node"),
        (lose_lock, "has lock_ref below its children's sum, 1"),
        (miscount, "evictable_pages is 5, not 4"),
        (misfile, "filed in .* under other tokens"),
        (rename, "filed in .* under another key than its own"),
        (shorten, "has 2 tokens on 1 pages"),
        (forget_use, "is evictable but not in the use order"),
        (offer_locked, "in the use order but held"),
        (reorder, "used earlier"),
    ],
)
def test_check_names_the_damage(
    damage: Callable[[RadixTree, PageAllocator, Node], None], message: str
) -> None:
    tree, allocator, locked = build()
    damage(tree, allocator, locked)
    with pytest.raises(CheckFailed, match=message):
        check(tree, allocator)


def test_check_compares_locks_with_those_that_are_held() -> None:
    tree, allocator, _ = build()
    with pytest.raises(CheckFailed, match="should have lock_ref 0"):
        check(tree, allocator, locks=[])


def test_check_counts_what_requests_hold() -> None:
    tree, allocator, locked = build()
    own = allocator.allocate(2)
    check(tree, allocator, held=[own])
    with pytest.raises(CheckFailed, match=r"belongs to <Node .* and request 1"):
        check(tree, allocator, held=[own, locked.pages])
