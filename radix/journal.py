"""What happens to a tree, for those who follow it from elsewhere.

    grown   a node has more tokens at its end; a new one has a parent
    cut     a node has fewer
    gone    a node, and all below it
    split   the first tokens of a node are another's now, above it

Changes are kept until they are taken; a tree that nobody follows has no journal.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Literal, NamedTuple

from .node import Node

__all__ = ["Change", "TreeJournal", "snapshot_changes"]


class Change(NamedTuple):
    """One change; `token_ids`: those added, those cut, or those of the upper part."""

    kind: Literal["grown", "cut", "gone", "split"]
    node: int  # its id
    other: int = 0  # of a new node its parent (0: its namespace's root), of a split the upper part
    namespace: Hashable = None  # of a new node, or an upper part, below the root
    token_ids: array[int] = array("i")


class TreeJournal:
    """Owns the changes that were not taken yet."""

    def __init__(self) -> None:
        self._changes: list[Change] = []

    def take(self) -> list[Change]:
        """All changes since the last time, in order."""
        taken, self._changes = self._changes, []
        return taken

    def note_new(self, node: Node) -> None:
        """A node was put below its parent."""
        self._changes.append(_new(node))

    def note_growth(self, node: Node, token_ids: array[int]) -> None:
        """A node goes on with these."""
        self._changes.append(Change("grown", node.id, token_ids=token_ids))

    def note_cut(self, node: Node, token_ids: array[int]) -> None:
        """A node ends before these."""
        self._changes.append(Change("cut", node.id, token_ids=token_ids))

    def note_gone(self, node: Node) -> None:
        """A node has left, with all below it."""
        self._changes.append(Change("gone", node.id))

    def note_split(self, node: Node, upper: Node) -> None:
        """`upper` has the first tokens of `node` now."""
        namespace = _namespace_below_root(upper)
        self._changes.append(Change("split", node.id, upper.id, namespace, upper.token_ids[:]))


def snapshot_changes(nodes: list[Node]) -> list[Change]:
    """The changes that make these nodes, given parents first, of nothing."""
    return [_new(node) for node in nodes if not node.is_root]


def _new(node: Node) -> Change:
    assert node.parent is not None, "a root holds no tokens"
    above = 0 if node.parent.is_root else node.parent.id
    return Change("grown", node.id, above, _namespace_below_root(node), node.token_ids[:])


def _namespace_below_root(node: Node) -> Hashable:
    """None elsewhere."""
    return node.namespace if node.parent is not None and node.parent.is_root else None
