"""One replica's cache as it tells of it (`runtime/gateway/cache_feed.py`), node by node.

Exact up to one step, while it is `is_known`; a replica that cannot be followed (its tokenizer's
bytes are not known) never is, and what was sent to it counts instead.
"""

from __future__ import annotations

from typing import Any

from ..radix.fleet import FleetTree, Place

Namespace = str


class _Mirrored:
    __slots__ = ("above", "below", "end", "namespace", "num_bytes")

    def __init__(self, above: _Mirrored | None, namespace: Namespace) -> None:
        self.above = above
        self.below: dict[int, _Mirrored] = {}
        self.namespace = namespace
        self.num_bytes = 0  # that it writes
        self.end: Place[int] | None = None  # in the fleet's tree; None: it writes nothing


class CacheMirror:
    """Owns the replica's nodes, and keeps its part of the fleet's tree."""

    def __init__(self, tree: FleetTree[int], number: int) -> None:
        self._tree = tree
        self._number = number
        self._nodes: dict[int, _Mirrored] = {}
        self.is_known = False
        self.costs: dict[str, float] = {}

    def reset(self) -> None:
        """Nothing is known of it any more."""
        self.is_known = False
        self._nodes.clear()
        self._tree.forget(self._number)

    def take(self, changes: list[Any]) -> None:
        """A `cache` message's changes, behind their head."""
        head, *rest = changes
        if head.get("reset"):
            self.reset()
            self.is_known = True
        self.costs = head.get("costs", self.costs)
        if not self.is_known:
            return
        for kind, number, other, namespace, text, num_tokens in rest:
            written = text.encode("latin-1")
            if kind == "grown":
                self._grow(number, other, namespace, written, num_tokens)
            elif number not in self._nodes:
                continue
            elif kind == "cut":
                self._cut(self._nodes[number], len(written))
            elif kind == "gone":
                self._remove(number)
            elif kind == "split":
                self._split(number, other, len(written))

    def _grow(
        self, number: int, other: int, namespace: str | None, text: bytes, num_tokens: int
    ) -> None:
        node = self._nodes.get(number)
        if node is None:
            above = self._nodes.get(other)
            own = namespace if above is None else above.namespace
            if own is None:
                return  # its parent is not known: it comes with the next reset
            node = self._nodes[number] = _Mirrored(above, own)
            if above is not None:
                above.below[number] = node
        if not text:
            return
        if node.end is None:
            node.end = self._tree.cover_below(self._end(node), text, self._number, num_tokens)
        else:
            node.end = self._tree.extend(node.end, text, self._number, num_tokens)
        node.num_bytes += len(text)

    def _cut(self, node: _Mirrored, num_bytes: int) -> None:
        self._uncover(node, min(num_bytes, node.num_bytes))

    def _remove(self, number: int) -> None:
        """A node leaves, and those below it before it."""
        top = self._nodes[number]
        if top.above is not None:
            top.above.below.pop(number, None)
        nodes = [(number, top)]
        for _, node in nodes:  # the list grows in the loop
            nodes.extend(node.below.items())
        for each, node in reversed(nodes):
            self._uncover(node, node.num_bytes)
            del self._nodes[each]

    def _split(self, number: int, upper_number: int, num_bytes: int) -> None:
        """What is covered stays; two nodes have it now."""
        node = self._nodes[number]
        upper = self._nodes[upper_number] = _Mirrored(node.above, node.namespace)
        upper.num_bytes = min(num_bytes, node.num_bytes)
        node.num_bytes -= upper.num_bytes
        if upper.num_bytes and node.end is not None:
            upper.end = self._tree.above(node.end, node.num_bytes)
        if not node.num_bytes:
            node.end = None
        if node.above is not None:
            del node.above.below[number]
            node.above.below[upper_number] = upper
        upper.below[number] = node
        node.above = upper

    def _uncover(self, node: _Mirrored, num_bytes: int) -> None:
        """Its last bytes are there no more."""
        if not num_bytes or node.end is None:
            return
        end = self._tree.uncover_above(node.end, num_bytes, self._number)
        node.num_bytes -= num_bytes
        node.end = end if node.num_bytes else None

    def _end(self, node: _Mirrored) -> Place[int]:
        """Where the text from the root to the node's end ends."""
        step: _Mirrored | None = node
        while step is not None:
            if step.end is not None:
                return step.end
            step = step.above
        return self._tree.root(node.namespace)
