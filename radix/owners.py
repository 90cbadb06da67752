"""Who alone uses a prefix, and what becomes of it after the last use.

A node has an owner while one program alone has used it. When that program ends, what is still its
own is aged: it stands in front of the whole use order, children first, and is evicted before all
else. What others have used too is never aged by anybody's end.
"""

from __future__ import annotations

from collections.abc import Hashable

from .node import Node, UseOrder

__all__ = ["age", "age_path", "note_user"]


def note_user(node: Node, owner: Hashable) -> None:
    """`owner` uses the path to `node`: what belonged to another belongs to nobody from now on."""
    step: Node | None = node
    while step is not None:
        if step.owner is not owner:
            step.owner = None
        step = step.parent


def age(node: Node, order: UseOrder) -> None:
    """The owner of `node` has used it for the last time: what is his alone there, below it and
    above it, is evicted before all else, but for what is in use.

    Cost: O(nodes below, nodes on the path that are his, and their children).
    """
    owner = node.owner
    if owner is None:
        return
    nodes = [node]
    for step in nodes:  # it grows meanwhile
        nodes.extend(step.children.values())
    for step in reversed(nodes):
        if step.owner is owner:
            _age_one(step, order)
    above = node.parent
    while above is not None and above.owner is owner and _age_one(above, order):
        above = above.parent


def age_path(node: Node, order: UseOrder) -> None:
    """Whosever it is, the path to `node` is evicted before all else, with what alone continues it,
    up to where it is in use or branches."""
    while len(node.children) == 1:
        (node,) = node.children.values()
    step: Node | None = node
    while step is not None and _age_one(step, order):
        step = step.parent


def _age_one(node: Node, order: UseOrder) -> bool:
    """False where it is in use, or something below it is younger."""
    if node.older is None or not _are_aged(node.children):
        return False
    order.age(node)
    node.last_use = 0
    return True


def _are_aged(children: dict[bytes, Node]) -> bool:
    """The youngest child is asked first: children usually end in their order."""
    return all(child.last_use == 0 for child in reversed(children.values()))
