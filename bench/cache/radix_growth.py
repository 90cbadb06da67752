"""How the cost of a call on the radix tree grows with its number of nodes: `bench radix --growth`.

Trees of DEPTH levels whose edges are all of EDGE_TOKENS tokens, page size 1. Leaves are chosen
evenly at random, so that in a big tree nearly all that a call reads is in no cache of the
processor: the number of steps is the same, the wait for memory is what grows.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from array import array
from collections.abc import Sequence

from ...radix.tree import RadixTree

EDGE_TOKENS, DEPTH = 16, 4
FAN_OUTS = (10, 18, 32)  # 11,110, 111,150 and 1,082,400 nodes
CALLS = 1_000  # of each kind, per repeat

Times = dict[str, float]


def growth(fan_outs: Sequence[int], repeats: int) -> list[dict[str, object]]:
    """A row per tree: CPU microseconds per call, medians over the repeats, and their growth."""
    rows: list[dict[str, object]] = []
    smallest: Times | None = None
    for fan_out in fan_outs:
        tree = full_tree(fan_out, num_spares=repeats * CALLS)
        num_nodes = tree.num_nodes
        gc.collect()
        found = [_serve(tree, fan_out, repeat) for repeat in range(repeats)]
        medians = {key: statistics.median(times[key] for times in found) for key in found[0]}
        smallest = smallest or medians
        grown = {f"{key[:-3]}_growth": medians[key] / smallest[key] for key in medians}
        rows.append({"num_nodes": num_nodes, **medians, **grown})
    return rows


def full_tree(fan_out: int, num_spares: int) -> RadixTree:
    """A tree with `fan_out` children per node; `num_spares` spare leaves are evicted first.

    Its page ids mean nothing: a tree does not look at them.
    """
    tree = RadixTree()
    rng = random.Random(0)
    for spare in range(num_spares):
        path = _path(rng.randrange(fan_out**DEPTH), fan_out, fan_out + spare)
        tree.insert("", path, path)
    for leaf in range(fan_out**DEPTH):
        path = _path(leaf, fan_out)
        tree.insert("", path, path)
    return tree


def _serve(tree: RadixTree, fan_out: int, repeat: int) -> Times:
    """CALLS times each: match a leaf, lock and unlock it, evict a spare leaf, insert a new one."""
    rng = random.Random(repeat)
    leaves = range(fan_out**DEPTH)
    first_new = fan_out + (repeat + 1_000) * CALLS
    known = [_path(leaf, fan_out) for leaf in rng.choices(leaves, k=CALLS)]
    new = [
        _path(leaf, fan_out, first_new + index)
        for index, leaf in enumerate(rng.choices(leaves, k=CALLS))
    ]
    clock = time.process_time
    started = clock()
    nodes = [tree.match("", path).node for path in known]
    matched = clock()
    for node in nodes:
        tree.lock(node)
        tree.unlock(node)
    unlocked = clock()
    for _ in range(CALLS):
        tree.evict(EDGE_TOKENS)
    evicted = clock()
    for path in new:
        tree.insert("", path, path)
    inserted = clock()
    times = {
        "match_us": matched - started,
        "lock_unlock_us": unlocked - matched,
        "evict_us": evicted - unlocked,
        "insert_us": inserted - evicted,
        "all_us": inserted - started,
    }
    return {name: seconds / CALLS * 1e6 for name, seconds in times.items()}


def _path(leaf: int, fan_out: int, last: int | None = None) -> array[int]:
    """The tokens of the path to leaf number `leaf`, or to its sibling with the edge `last`."""
    edges = [leaf // fan_out**level % fan_out for level in reversed(range(DEPTH))]
    if last is not None:
        edges[-1] = last
    path = array("i")
    for edge in edges:
        path.extend(range(edge * EDGE_TOKENS, (edge + 1) * EDGE_TOKENS))
    return path
