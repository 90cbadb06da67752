"""Which replicas have which prefixes cached: one radix tree over texts, for many engines.

Texts are bytes (UTF-8), since replicas need not agree on token ids, and a router that places a
program has its text before anybody has tokenized it. Each node knows the holders of its run, with
the number of tokens it has there. What a holder has is closed under prefixes, so that a node's
holders are among its parent's.

What is only believed of a holder is inserted whole, and once. What a holder tells of its own nodes
is covered and uncovered node by node, and counted: two of its nodes may write the same bytes.

Cost: `insert`, `cover` and `match` take Python steps for the nodes on the path; runs are
compared as blocks. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from .snapshot import FleetNodeSnapshot

__all__ = ["FleetTree"]

H = TypeVar("H", bound=Hashable)


class _Node(Generic[H]):
    __slots__ = ("children", "holders", "more", "parent", "run", "used")

    def __init__(self, parent: _Node[H] | None, run: bytes) -> None:
        self.parent = parent
        self.run = run
        self.children: dict[int, _Node[H]] = {}  # by the first byte of their runs
        self.holders: dict[H, float] = {}  # tokens of the run
        self.more: dict[H, int] = {}  # how often holders have it besides
        self.used = 0  # the tree's clock at its last use


class FleetTree(Generic[H]):
    """Owns what is known of all holders' caches, by namespace. Invariant: a node without children
    has holders, and each holder of a node holds its parent."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[H]] = {}
        self._clock = 0
        self.num_bytes = 0  # of all runs

    def insert(self, namespace: Hashable, text: bytes, holder: H, num_tokens: float) -> None:
        """`holder` has all of a text, of so many tokens; what it already held of it stays."""
        rate = num_tokens / max(1, len(text))
        for node in self._make(namespace, text, 0):
            node.holders.setdefault(holder, len(node.run) * rate)

    def cover(
        self, namespace: Hashable, text: bytes, start: int, holder: H, num_tokens: float
    ) -> None:
        """`holder` has a node that writes the text from `start` on, in so many tokens."""
        rate = num_tokens / max(1, len(text) - start)
        for node in self._make(namespace, text, start):
            if holder in node.holders:
                node.more[holder] = node.more.get(holder, 0) + 1
            else:
                node.holders[holder] = len(node.run) * rate

    def uncover(self, namespace: Hashable, text: bytes, start: int, holder: H) -> None:
        """It has that node no more."""
        for node in reversed(list(self._make(namespace, text, start))):
            more = node.more.pop(holder, 0)
            if more > 1:
                node.more[holder] = more - 1
            elif not more:
                node.holders.pop(holder, None)
            self._prune(namespace, node)

    def _make(self, namespace: Hashable, text: bytes, start: int) -> Iterator[_Node[H]]:
        """The nodes of exactly the text from `start` on; what is missing is made. It is a use."""
        node = self._roots.setdefault(namespace, _Node(None, b""))
        self._clock += 1
        at = 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = _Node(node, text[at:])
                node.children[text[at]] = child
                self.num_bytes += len(child.run)
            elif not text.startswith(child.run, at):
                child = self._split(child, _num_common(child.run, text, at))
            if at < start < at + len(child.run):
                child = self._split(child, start - at)
            child.used = self._clock
            node, at = child, at + len(child.run)
            if at > start:
                yield node

    def texts_of(self, holder: H) -> Iterator[tuple[Hashable, bytes]]:
        """The longest texts that a holder has, with their namespaces."""
        for namespace, root in self._roots.items():
            stack = [(root, b"")]
            while stack:
                node, text = stack.pop()
                below = [each for each in node.children.values() if holder in each.holders]
                stack += [(each, text + each.run) for each in below]
                if text and not below:
                    yield namespace, text

    def snapshot(
        self, *, max_nodes: int = 1000, max_bytes: int = 192, namespace: Hashable = None
    ) -> tuple[list[FleetNodeSnapshot], bool]:
        """The runs used last, parents first, each with its first `max_bytes`, and whether these are
        all; at most `max_nodes` besides the roots. A run is as long as the same holders have it and
        nothing forks. With `namespace` only that one. It is no use.

        Cost: Python steps for what is listed and its children, whatever else there is.
        """
        rows: list[FleetNodeSnapshot] = []
        order = count()  # of nodes that were used at once
        best: list[tuple[int, int, _Node[H], FleetNodeSnapshot]] = []  # below what is listed

        def note(row: FleetNodeSnapshot, last: _Node[H]) -> None:
            rows.append(row)
            for child in last.children.values():
                heappush(best, (-child.used, next(order), child, row))

        for name, root in self._roots.items():
            if namespace is None or name == namespace:
                text = name if isinstance(name, str) else repr(name)
                note(_row(len(rows) + 1, None, text, b"", {}, max_bytes), root)
        num_roots = len(rows)
        while best and len(rows) < num_roots + max_nodes:
            _, _, first, above = heappop(best)
            last, run, tokens = _lengthened(first)
            number, text = len(rows) + 1, above["namespace"]
            note(_row(number, above["id"], text, run, tokens, max_bytes), last)
        _sum_up(rows)
        return rows, not best

    def match(self, namespace: Hashable, text: bytes) -> dict[H, float]:
        """How many tokens of a text each holder has, of those that have any. It is a use."""
        found: dict[H, float] = {}
        self._clock += 1
        for node, num_bytes in self._path(namespace, text):
            node.used = self._clock
            share = num_bytes / len(node.run)
            for holder, num_tokens in node.holders.items():
                found[holder] = found.get(holder, 0.0) + share * num_tokens
        return found

    def forget(self, holder: H) -> None:
        """`holder` has nothing."""
        for namespace, root in list(self._roots.items()):
            nodes = [root]
            for node in nodes:
                nodes.extend(node.children.values())
            for node in reversed(nodes):
                node.holders.pop(holder, None)
                node.more.pop(holder, None)
                self._prune(namespace, node)

    def shrink(self, max_bytes: int) -> None:
        """Forget what was used longest ago, until no more than so many bytes are held."""
        if self.num_bytes <= max_bytes:
            return
        leaves: list[tuple[int, Hashable, _Node[H]]] = []
        for namespace, root in self._roots.items():
            nodes = [root]
            for node in nodes:
                nodes.extend(node.children.values())
            leaves += [(node.used, namespace, node) for node in nodes[1:] if not node.children]
        for _, namespace, node in sorted(leaves, key=lambda leaf: leaf[0]):
            if self.num_bytes <= max_bytes * 3 // 4:
                break
            node.holders.clear()
            node.more.clear()
            self._prune(namespace, node)
        self.shrink(max_bytes)  # parents of those have become leaves

    def _path(self, namespace: Hashable, text: bytes) -> Iterator[tuple[_Node[H], int]]:
        """The nodes that a text enters, and how many bytes of each it has."""
        node = self._roots.get(namespace)
        at = 0
        while node is not None and at < len(text):
            node = node.children.get(text[at])
            if node is None:
                return
            if not text.startswith(node.run, at):
                yield node, _num_common(node.run, text, at)
                return
            yield node, len(node.run)
            at += len(node.run)

    def _split(self, node: _Node[H], at: int) -> _Node[H]:
        """Puts a node with the first `at` bytes of the run above; returns that."""
        upper: _Node[H] = _Node(node.parent, node.run[:at])
        assert node.parent is not None and 0 < at < len(node.run), "no place inside the run"
        share = at / len(node.run)
        upper.holders = {holder: share * count for holder, count in node.holders.items()}
        node.holders = {h: count - upper.holders[h] for h, count in node.holders.items()}
        upper.used, upper.more = node.used, dict(node.more)
        node.parent.children[upper.run[0]] = upper
        node.parent, node.run = upper, node.run[at:]
        upper.children[node.run[0]] = node
        return upper

    def _prune(self, namespace: Hashable, node: _Node[H]) -> None:
        """Remove a node that nobody holds, and those above that only led to it."""
        step: _Node[H] | None = node
        while step is not None and not step.children and not step.holders:
            above = step.parent
            if above is None:
                self._roots.pop(namespace, None)
                return
            self._cut_if_empty(step)
            step = above

    def _cut_if_empty(self, node: _Node[H]) -> None:
        above = node.parent
        if above is None or node.children or node.holders:
            return
        if above.children.get(node.run[0]) is node:
            del above.children[node.run[0]]
            self.num_bytes -= len(node.run)


def _num_common(run: bytes, text: bytes, at: int) -> int:
    """How many of the run's first bytes `text` has from `at` on; halves blocks that it compares."""
    low, high = 0, min(len(run), len(text) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(run[low:middle], at + low):
            low = middle
        else:
            high = middle - 1
    return low


def _lengthened(node: _Node[H]) -> tuple[_Node[H], bytes, dict[H, float]]:
    """The last node of the run that begins with this one, the run, and the tokens that each holder
    has of it."""
    runs, tokens = [node.run], dict(node.holders)
    while len(node.children) == 1:
        (child,) = node.children.values()
        if child.holders.keys() != tokens.keys():
            break
        runs.append(child.run)
        tokens = {holder: tokens[holder] + more for holder, more in child.holders.items()}
        node = child
    return node, b"".join(runs), tokens


def _row(
    number: int,
    parent: int | None,
    namespace: str,
    run: bytes,
    holders: dict[H, float],
    max_bytes: int,
) -> FleetNodeSnapshot:
    tokens = {str(holder): round(holders[holder]) for holder in sorted(holders, key=str)}
    return FleetNodeSnapshot(
        id=number,
        parent=parent,
        namespace=namespace,
        num_tokens=max(tokens.values(), default=0),
        num_bytes=len(run),
        text=run[:max_bytes].decode("utf-8", "replace"),
        is_cut=len(run) > max_bytes,
        holders=tokens,
    )


def _sum_up(rows: list[FleetNodeSnapshot]) -> None:
    """Roots have the holders of what is below them."""
    roots = {row["id"]: row for row in rows if row["parent"] is None}
    root_of = {number: row["holders"] for number, row in roots.items()}
    for row in rows:
        if row["parent"] is not None:
            total = root_of[row["id"]] = root_of[row["parent"]]
            for holder, num_tokens in row["holders"].items():
                total[holder] = total.get(holder, 0) + num_tokens
