"""Which replicas have which prefixes cached: one radix tree over texts, for many engines.

Texts are bytes (UTF-8), since replicas need not agree on token ids, and a router that places a
program has its text before anybody has tokenized it. Each node knows the holders of its run, with
the number of tokens it has there. What a holder has is closed under prefixes, so that a node's
holders are among its parent's.

What is only believed of a holder is inserted whole, and once. What a holder tells of its own nodes
is covered and uncovered node by node, and counted: two of its nodes may write the same bytes. Where
one ends is a *place*: a node of this tree, which ends there as long as the holder has it.

Cost: `insert`, `cover` and `match` take Python steps for the nodes on the path, `cover_below` and
`uncover_above` for those that they concern; runs are compared as blocks. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from .snapshot import FleetNodeSnapshot

__all__ = ["FleetTree", "Place"]

H = TypeVar("H", bound=Hashable)

NODE_BYTES = 600  # of a node besides its run, with one holder (measured, CPython 3.11), about


class Place(Generic[H]):
    """A node: the end of its run. Nobody but the tree looks into it."""

    __slots__ = ("children", "holders", "more", "parent", "run", "used")

    def __init__(self, parent: Place[H] | None, run: bytes) -> None:
        self.parent = parent
        self.run = run
        self.children: dict[int, Place[H]] = {}  # by the first byte of their runs
        self.holders: dict[H, float] = {}  # tokens of the run
        self.more: dict[H, int] = {}  # how often holders have it besides
        self.used = 0  # the tree's clock at its last use


class _Root(Place[H]):
    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable) -> None:
        super().__init__(None, b"")
        self.namespace = namespace


class FleetTree(Generic[H]):
    """Owns what is known of all holders' caches, by namespace. Invariant: a node without children
    has holders, and each holder of a node holds its parent."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Root[H]] = {}
        self._clock = 0
        self.num_bytes = 0  # of all runs
        self.num_nodes = 0  # roots among them

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, about."""
        return self.num_bytes + self.num_nodes * NODE_BYTES

    def insert(self, namespace: Hashable, text: bytes, holder: H, num_tokens: float) -> None:
        """`holder` has all of a text, of so many tokens; what it already held of it stays."""
        if not text:
            return  # a root without nodes would stay
        rate = num_tokens / max(1, len(text))
        for node in self._make(self.root(namespace), text):
            node.holders.setdefault(holder, len(node.run) * rate)

    def cover(self, namespace: Hashable, text: bytes, holder: H, num_tokens: float) -> None:
        """`holder` has a node that writes the text, in so many tokens."""
        if text:
            self.cover_below(self.root(namespace), text, holder, num_tokens)

    def uncover(self, namespace: Hashable, text: bytes, holder: H) -> None:
        """It has that node no more."""
        if not text:
            return
        nodes = self._make(self.root(namespace), text)
        for node in reversed(nodes):
            self._release(node, holder)

    # --- by places ------------------------------------------------------------------------------

    def root(self, namespace: Hashable) -> Place[H]:
        """Where texts begin. It is for use at once."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Root(namespace)
            self.num_nodes += 1
        return root

    def cover_below(self, place: Place[H], text: bytes, holder: H, num_tokens: float) -> Place[H]:
        """`holder` has a node that writes the text from there on, in so many tokens; returns where
        it ends."""
        rate = num_tokens / max(1, len(text))
        for node in self._make(place, text):
            if holder in node.holders:
                node.more[holder] = node.more.get(holder, 0) + 1
            else:
                node.holders[holder] = len(node.run) * rate
            place = node
        return place

    def extend(self, place: Place[H], text: bytes, holder: H, num_tokens: float) -> Place[H]:
        """Its node that ends there goes on; returns where it ends now. Where nobody else is, the
        node of this tree grows: a token at a time must not make a node each."""
        is_own = len(place.holders) == 1 and not (place.more or place.children)
        if not is_own or place.parent is None:
            return self.cover_below(place, text, holder, num_tokens)
        place.run += text
        place.holders[holder] += num_tokens
        self.num_bytes += len(text)
        return place

    def uncover_above(self, place: Place[H], num_bytes: int, holder: H) -> Place[H]:
        """It has the last bytes before a place no more; returns where they began."""
        while num_bytes > 0:
            place, above = self._whole(place, num_bytes)
            num_bytes -= len(place.run)
            self._release(place, holder)
            place = above
        return place

    def above(self, place: Place[H], num_bytes: int) -> Place[H]:
        """The place so many bytes before another one."""
        while num_bytes > 0:
            node, place = self._whole(place, num_bytes)
            num_bytes -= len(node.run)
        return place

    def _whole(self, place: Place[H], num_bytes: int) -> tuple[Place[H], Place[H]]:
        """The node that ends at a place, split where it has more bytes, and the place above it."""
        if len(place.run) > num_bytes:
            self._split(place, len(place.run) - num_bytes)
        assert place.parent is not None, "no text has so many bytes"
        return place, place.parent

    def _release(self, node: Place[H], holder: H) -> None:
        more = node.more.pop(holder, 0)
        if more > 1:
            node.more[holder] = more - 1
        elif not more:
            node.holders.pop(holder, None)
            self._prune(node)

    def _make(self, node: Place[H], text: bytes) -> list[Place[H]]:
        """The nodes of exactly the text from a place on; what is missing is made. It is a use."""
        self._clock += 1
        nodes: list[Place[H]] = []
        at = 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                child = node.children[text[at]] = Place(node, text[at:])
                self.num_bytes += len(child.run)
                self.num_nodes += 1
            elif not text.startswith(child.run, at):
                child = self._split(child, _num_common(child.run, text, at))
            child.used = self._clock
            nodes.append(child)
            node, at = child, at + len(child.run)
        return nodes

    # --- of all ---------------------------------------------------------------------------------

    def texts_of(self, holder: H) -> Iterator[tuple[Hashable, bytes]]:
        """The longest texts that a holder has, with their namespaces."""
        for namespace, root in self._roots.items():
            stack: list[tuple[Place[H], bytes]] = [(root, b"")]
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
        best: list[tuple[int, int, Place[H], FleetNodeSnapshot]] = []  # below what is listed

        def note(row: FleetNodeSnapshot, last: Place[H]) -> None:
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
        node: Place[H] | None = self._roots.get(namespace)
        at = 0
        while node is not None and at < len(text):
            node = node.children.get(text[at])
            if node is None:
                break
            node.used = self._clock
            is_whole = text.startswith(node.run, at)
            share = 1.0 if is_whole else _num_common(node.run, text, at) / len(node.run)
            for holder, num_tokens in node.holders.items():
                found[holder] = found.get(holder, 0.0) + share * num_tokens
            if not is_whole:
                break
            at += len(node.run)
        return found

    def forget(self, holder: H) -> None:
        """`holder` has nothing."""
        for root in list(self._roots.values()):
            nodes: list[Place[H]] = [root]
            for node in nodes:
                nodes.extend(node.children.values())
            for node in reversed(nodes):
                node.holders.pop(holder, None)
                node.more.pop(holder, None)
                self._prune(node)

    def shrink(self, max_bytes: int) -> None:
        """Forget what was used longest ago, once it takes more than so many bytes; a quarter of
        these is free then."""
        if self.size_bytes <= max_bytes:
            return
        order = count()  # of those that were used at once
        leaves: list[tuple[int, int, Place[H]]] = []
        for root in self._roots.values():
            nodes: list[Place[H]] = [root]
            for node in nodes:
                nodes.extend(node.children.values())
            leaves += [(each.used, next(order), each) for each in nodes[1:] if not each.children]
        heapify(leaves)
        while leaves and self.size_bytes > max_bytes * 3 // 4:
            leaf = heappop(leaves)[2]
            leaf.holders.clear()
            leaf.more.clear()
            above = self._prune(leaf)
            if above is not None and not above.children:
                heappush(leaves, (above.used, next(order), above))

    def _split(self, node: Place[H], at: int) -> Place[H]:
        """Puts a node with the first `at` bytes of the run above; returns that."""
        upper: Place[H] = Place(node.parent, node.run[:at])
        assert node.parent is not None and 0 < at < len(node.run), "no place inside the run"
        share = at / len(node.run)
        upper.holders = {holder: share * count for holder, count in node.holders.items()}
        node.holders = {h: count - upper.holders[h] for h, count in node.holders.items()}
        upper.used, upper.more = node.used, dict(node.more)
        node.parent.children[upper.run[0]] = upper
        node.parent, node.run = upper, node.run[at:]
        upper.children[node.run[0]] = node
        self.num_nodes += 1
        return upper

    def _prune(self, node: Place[H]) -> Place[H] | None:
        """Remove a node that nobody holds, and those above that only led to it; returns the first
        one that stays, None: its root has gone, too."""
        while not node.children and not node.holders:
            above = node.parent
            if above is None:
                assert isinstance(node, _Root)
                self.num_nodes -= self._roots.pop(node.namespace, None) is not None
                return None
            if above.children.get(node.run[0]) is node:
                del above.children[node.run[0]]
                self.num_bytes -= len(node.run)
                self.num_nodes -= 1
            node = above
        return node


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


def _lengthened(node: Place[H]) -> tuple[Place[H], bytes, dict[H, float]]:
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
