"""One replica's cache as it tells of it (`runtime/gateway/cache_feed.py`), node by node.

Exact up to one step, while it is `is_known`; a replica that cannot be followed (its tokenizer's
bytes are not known) never is, and what was sent to it counts instead.
"""

from __future__ import annotations

from typing import Any

from ..radix.fleet import FleetTree

Namespace = str


class _Mirrored:
    __slots__ = ("above", "below", "namespace", "num_tokens", "text")

    def __init__(self, above: _Mirrored | None, namespace: Namespace) -> None:
        self.above = above
        self.below: dict[int, _Mirrored] = {}
        self.namespace = namespace
        self.text = b""
        self.num_tokens = 0


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
                self._cut(self._nodes[number], written, num_tokens)
            elif kind == "gone":
                self._remove(number)
            elif kind == "split":
                self._split(number, other, written, num_tokens)

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
        start = self._path(node)
        node.text += text
        node.num_tokens += num_tokens
        path = start + text
        self._tree.cover(node.namespace, path, len(start), self._number, num_tokens)

    def _cut(self, node: _Mirrored, text: bytes, num_tokens: int) -> None:
        path = self._path(node)
        kept = len(node.text) - len(text)
        self._tree.uncover(node.namespace, path, len(path) - len(text), self._number)
        node.text = node.text[:kept]
        node.num_tokens -= num_tokens

    def _remove(self, number: int) -> None:
        """A node leaves, and those below it before it."""
        top = self._nodes[number]
        if top.above is not None:
            top.above.below.pop(number, None)
        nodes = [(number, top)]
        for _, node in nodes:  # the list grows in the loop
            nodes.extend(node.below.items())
        for each, node in reversed(nodes):
            path = self._path(node)
            self._tree.uncover(node.namespace, path, len(path) - len(node.text), self._number)
            del self._nodes[each]

    def _split(self, number: int, upper_number: int, text: bytes, num_tokens: int) -> None:
        """What is covered stays; two nodes have it now."""
        node = self._nodes[number]
        upper = self._nodes[upper_number] = _Mirrored(node.above, node.namespace)
        upper.text, upper.num_tokens = text, num_tokens
        if node.above is not None:
            del node.above.below[number]
            node.above.below[upper_number] = upper
        upper.below[number] = node
        node.above = upper
        node.text = node.text[len(text) :]
        node.num_tokens -= num_tokens

    def _path(self, node: _Mirrored) -> bytes:
        """The text from the root to the node's end."""
        parts = [node.text]
        step = node.above
        while step is not None:
            parts.append(step.text)
            step = step.above
        return b"".join(reversed(parts))
