"""Prefixes used by one program alone, and their eviction after its last use.

A node has an owner while only one program has used it. When that program ends, its remaining own
nodes are aged: they move to the front of the use order, children first, and are evicted before all
else. Nodes that others have used too are never aged when a program ends.
"""

from __future__ import annotations

from collections.abc import Hashable

from .node import Node, UseOrder

__all__ = ["age", "age_path", "note_user"]


def note_user(node: Node, owner: Hashable) -> None:
    """`owner` uses the path to `node`: nodes owned by another have no owner from now on."""
    step: Node | None = node
    while step is not None:
        if step.owner is not owner:
            step.owner = None
        step = step.parent


def age(node: Node, order: UseOrder) -> None:
    """The owner of `node` has used it for the last time: the owner's own nodes there, below and
    above it, are evicted before all else, unless they are in use.

    Cost: O(nodes below, owned nodes on the path, and their children).
    """
    owner = node.owner
    if owner is None:
        return
    nodes = [node]
    for step in nodes:  # the list grows in the loop
        nodes.extend(step.children.values())
    for step in reversed(nodes):
        if step.owner is owner:
            _age_one(step, order)
    above = node.parent
    while above is not None and above.owner is owner and _age_one(above, order):
        above = above.parent


def age_path(node: Node, order: UseOrder) -> None:
    """Whoever owns it, evict the path to `node` before all else, with its only continuation, up to
    where it is in use or branches."""
    while len(node.children) == 1:
        (node,) = node.children.values()
    step: Node | None = node
    while step is not None and _age_one(step, order):
        step = step.parent


def _age_one(node: Node, order: UseOrder) -> bool:
    """False if it is in use, or something below it is younger."""
    if node.older is None or not _are_aged(node.children):
        return False
    order.age(node)
    node.last_use = 0
    return True


def _are_aged(children: dict[bytes, Node]) -> bool:
    """The youngest child is checked first: children usually end in their order."""
    return all(child.last_use == 0 for child in reversed(children.values()))
