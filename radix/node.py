"""A node of the radix tree, its checkpoints, and the order in which free nodes were last used."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Iterator

from .pages import Pages

__all__ = ["Checkpoint", "Node", "UseOrder"]


class Node:
    """Owns one edge: a run of tokens and the pages that hold their KV.

    Invariant: `len(token_ids) == len(pages) * page_size`, but for a *tail*, which has less than a
    page of tokens, one page and no children; `end` is the length of the path from the root to the
    end of this run. A locked node is a handle on that whole path: it keeps its
    identity when the edge is split (this object becomes the lower part) and never grows while
    another holder has it. An unlocked node is a valid handle until the next call that changes the
    tree. After a node has left the tree, `is_attached` is False forever.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "end",
        "hits",
        "id",
        "is_attached",
        "key",
        "last_use",
        "lease_ref",
        "lock_ref",
        "namespace",
        "newer",
        "older",
        "owner",
        "pages",
        "parent",
        "pin_ref",
        "sorted_keys",
        "token_ids",
    )

    def __init__(
        self,
        id: int,
        namespace: Hashable,
        parent: Node | None,
        key: bytes,
        token_ids: array[int],
        pages: Pages,
        owner: Hashable = None,
    ) -> None:
        self.id = id
        self.namespace = namespace
        self.parent = parent  # None for the root of a namespace
        self.key = key  # the bytes of the first page of tokens: its key among its siblings
        self.token_ids = token_ids
        self.pages = pages
        self.end: int = len(token_ids) + (parent.end if parent is not None else 0)
        self.children: dict[bytes, Node] = {}  # by their keys
        self.sorted_keys: list[bytes] | None = None  # those keys, once RadixTree.begun_page asked
        self.checkpoints: dict[int, Checkpoint] | None = None  # by position (checkpoints.py)
        self.lock_ref = 0  # locks on this node or below it
        self.lease_ref = 0  # leases on this node or below it (leases.py)
        self.pin_ref = 0  # those of them that are pins
        self.owner = owner  # the only user; None: unknown, or several
        self.hits = 0  # matches that went through the whole of this node
        self.last_use = 0  # the tree's clock; 0 after it was aged
        self.is_attached = True
        self.older: Node | None = None  # neighbours in UseOrder; None when not in it
        self.newer: Node | None = None

    @property
    def start(self) -> int:
        """The length of the path up to this node's run."""
        return self.end - len(self.token_ids)

    @property
    def is_root(self) -> bool:
        return self.parent is None

    def __repr__(self) -> str:
        where = f"[{self.start}:{self.end}]" if self.is_attached else "detached"
        return f"<Node {self.id} {where} lock_ref={self.lock_ref} children={len(self.children)}>"


class Checkpoint:
    """A copy of the state behind the first `position` tokens of the path to `node`.

    Not `is_proven` until the step that writes it has been carried out: nobody may go on from it
    then, and it is not evicted. `node` is None once it is gone.
    """

    __slots__ = ("is_proven", "node", "position", "slot")

    def __init__(self, node: Node, position: int, slot: int, *, is_proven: bool) -> None:
        self.node: Node | None = node
        self.position = position
        self.slot = slot
        self.is_proven = is_proven

    def __repr__(self) -> str:
        return f"<Checkpoint at {self.position} in slot {self.slot} of {self.node}>"


class UseOrder:
    """The free nodes (neither locked nor leased) from least to most recently used: two intrusive
    doubly linked rings, the aged nodes before all others.

    Invariant: a child comes before its parent. A use of a node is a use of its ancestors and puts
    them behind it, and a node is aged after its children, so the oldest node is always a leaf: a
    parent whose last child was evicted is already in its place, and nothing is ever searched or
    sorted. O(1) each.
    """

    def __init__(self) -> None:
        self._aged = _empty_ring()
        self._ring = _empty_ring()

    @property
    def oldest(self) -> Node | None:
        """The leaf to evict next."""
        node = self._aged.newer
        if node is not self._aged:
            return node
        node = self._ring.newer
        return None if node is self._ring else node

    def age(self, node: Node) -> None:
        """Moves a node of the order, whose children were all aged, behind the aged ones."""
        self.drop(node)
        self.put(node, self._aged)

    def put(self, node: Node, before: Node | None = None) -> None:
        """Puts a node that is not in the order just before `before`, or last."""
        newer = before if before is not None else self._ring
        older = newer.older
        assert older is not None, f"{newer} is not in the order"
        node.older, node.newer = older, newer
        older.newer = newer.older = node

    def put_after(self, node: Node, older: Node) -> None:
        """Puts a node that is not in the order just after `older`."""
        self.put(node, older.newer)

    def drop(self, node: Node) -> None:
        """Removes a node from the order."""
        older, newer = node.older, node.newer
        assert older is not None and newer is not None, f"{node} is not in the order"
        older.newer, newer.older = newer, older
        node.older = node.newer = None

    def renew(self, path: Iterable[Node]) -> None:
        """Moves the free nodes of a path, given from the top, behind all others."""
        newer = self._ring
        for node in path:
            before, after = node.older, node.newer
            if before is None or after is None:
                continue  # locked or leased
            before.newer, after.older = after, before
            before = newer.older
            assert before is not None, f"{newer} is not in the order"
            node.older, node.newer = before, newer
            before.newer = newer.older = newer = node

    def __iter__(self) -> Iterator[Node]:
        """From least to most recently used."""
        for ring in (self._aged, self._ring):
            node = ring.newer
            while node is not None and node is not ring:
                yield node
                node = node.newer

    def __reversed__(self) -> Iterator[Node]:
        """From most to least recently used: a parent comes before its children."""
        for ring in (self._ring, self._aged):
            node = ring.older
            while node is not None and node is not ring:
                yield node
                node = node.older


def _empty_ring() -> Node:
    ring = Node(-1, None, None, b"", array("i"), array("i"))
    ring.older = ring.newer = ring
    return ring
