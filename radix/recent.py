"""The most recently used part of a tree, for a picture of a large one.

Cost: O(nodes returned), whatever the size of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from .node import Node
from .tree import RadixTree

__all__ = ["recent_nodes"]


def recent_nodes(tree: RadixTree, held: Iterable[Node], max_nodes: int) -> list[Node]:
    """About `max_nodes` nodes: the paths to the `held` ones (locked or leased), then the others,
    most recently used first. Each comes after its parent, and roots are included; the last path
    is not cut, so there may be a few more."""
    chosen: dict[int, Node] = {}
    for node in chain(held, reversed(tree.use_order)):
        if len(chosen) >= max_nodes:
            break
        if node.parent is not None and node.parent.id in chosen:
            chosen[node.id] = node
            continue
        path: list[Node] = []
        step: Node | None = node
        while step is not None and step.id not in chosen:
            path.append(step)
            step = step.parent
        for step in reversed(path):
            chosen[step.id] = step
    return list(chosen.values())
