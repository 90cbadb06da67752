"""What each call may look at, counted in nodes: cost never depends on the size of the tree."""

from __future__ import annotations

import gc
import weakref
from array import array

from stemma.radix.tree import RadixTree


def wide_tree(num_leaves: int) -> RadixTree:
    """One node of 4 common tokens over `num_leaves` leaves of 4."""
    tree = RadixTree()
    for index in range(num_leaves):
        tree.insert("", [1, 2, 3, 4, 100 + index, 5, 6, 7], range(index * 8, index * 8 + 8))
    return tree


def visits(tree: RadixTree, since: int = 0) -> int:
    return tree.num_visits - since


def test_match_insert_and_lock_visit_their_path_only() -> None:
    for num_leaves in (10, 2_000):
        tree = wide_tree(num_leaves)
        before = tree.num_visits
        node = tree.match("", [1, 2, 3, 4, 105, 5, 6, 7]).node
        tree.insert("", [1, 2, 3, 4, 105, 5, 9, 9], range(8))
        tree.lock(node)
        tree.unlock(node)
        assert visits(tree, before) == 3 + 3 + 4 + 4  # the second insert split the leaf


def test_evict_visits_what_it_frees_only() -> None:
    tree = wide_tree(2_000)
    before = tree.num_visits
    assert len(tree.evict(40)) == 40
    assert visits(tree, before) == 10


def test_evicting_in_small_calls_visits_no_more_than_one_call() -> None:
    tree = wide_tree(2_000)
    before = tree.num_visits
    assert sum(len(tree.evict(4)) for _ in range(10)) == 40
    assert visits(tree, before) == 10
    assert [len(tree.evict(1)) for _ in range(4)] == [1, 1, 1, 1]  # the tail of one leaf
    assert visits(tree, before) == 14


def test_extend_does_not_walk_from_the_root() -> None:
    tree = RadixTree()
    node = tree.match("", []).node
    tree.lock(node)
    for depth in range(200):
        tree.lock(node)  # somebody else holds each node, so each extend makes a child
        inserted = tree.extend(node, [depth], [depth])
        tree.move_lock(node, inserted.node)
        node = inserted.node
    before = tree.num_visits
    tree.extend(node, [1, 2, 3], [300, 301, 302])
    assert tree.num_nodes == 200 and visits(tree, before) == 1


def test_decoding_a_token_at_a_time_keeps_one_node() -> None:
    tree = RadixTree()
    tree.insert("", array("i", range(1_000)), range(1_000))
    node = tree.match("", array("i", range(1_000))).node
    tree.lock(node)
    for token in range(1_000, 2_000):
        node = tree.extend(node, [token], [token]).node
    assert tree.num_nodes == 1 and node.end == 2_000


def test_an_evicted_node_is_freed_without_the_cycle_collector() -> None:
    class Run(array):  # type: ignore[type-arg]
        """An array that can be watched."""

    tree = RadixTree()
    node = tree.insert("", [1, 2, 3], [0, 1, 2]).node
    node.pages = Run("i", node.pages)
    watch = weakref.ref(node.pages)
    gc.disable()
    try:
        tree.evict(3)
        del node
        assert watch() is None
    finally:
        gc.enable()
