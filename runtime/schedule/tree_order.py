"""Orders rows by the radix tree, and finds the KV that neighbouring rows share.

Depth-first order puts the users of a node next to each other, at every level at once. Two
neighbours share the tokens up to where their paths part, so the shared runs are the intervals of
that array of lengths, nested like the tree (the lcp-interval tree of suffix arrays: Abouelhoda,
Kurtz and Ohlebusch 2004). A run becomes a segment, whose attention is computed once for all its
rows, if that saves more than it costs: n rows that share L tokens read L of them instead of n L,
and each row has one more partial result to merge. A run that does not pay is left to the rows, or
joined to the longer run of fewer rows below it.

Cost: O(rows * depth) for the paths, O(rows * levels) for the segments. Both are found once for all
steps in which the same requests decode: what they hold of the tree stays as it is meanwhile, unless
a node of it is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...radix.tree import Node, RadixTree
from .plan import SharedSegment
from .request import Request

Path = tuple[Node, ...]  # from below the root to the request's node


class TreeOrder:
    """Owns what was found for the last step.

    Invariant: it holds for the same nodes, as long as the tree has split none since: a node that a
    request locks stays where it is, and grows only at an end that no other request has.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._num_splits = 0
        self._nodes: list[Node | None] = []
        self._order: list[int] = []
        self._common: list[int] = []  # tokens that neighbours' paths share
        self._segments: tuple[list[int], int, tuple[SharedSegment, ...]] = ([], 0, ())

    def depth_first(self, requests: Sequence[Request]) -> Sequence[int]:
        """Indices of `requests` in depth-first order of the tree."""
        nodes = [request.node for request in requests]
        if nodes != self._nodes or self._num_splits != self._tree.num_splits:
            self._nodes, self._num_splits = nodes, self._tree.num_splits
            paths = [_path(node) for node in nodes]
            keys = [tuple([node.id for node in path]) for path in paths]
            self._order = sorted(range(len(nodes)), key=keys.__getitem__)
            in_order = [paths[index] for index in self._order]
            self._common = [_common_end(path, below) for path, below in pairwise(in_order)]
        return self._order

    def segments(self, starts: Sequence[int], cost_tokens: int) -> tuple[SharedSegment, ...]:
        """The segments that pay of the rows that `depth_first` has ordered, outermost first.

        starts[r]: position of row r's first query; tokens that a row computes in this step are not
        shared, since its own queries may see only part of them. `cost_tokens`: a row's cost of
        being in a segment, in tokens whose KV could be read in that time.
        """
        shared = list(map(min, self._common, starts, starts[1:]))
        if self._segments[:2] != (shared, cost_tokens):
            found = shared_segments(shared, self._tree.page_size, cost_tokens)
            self._segments = (shared, cost_tokens, found)
        return self._segments[2]


def shared_segments(
    shared: Sequence[int], page_size: int, cost_tokens: int
) -> tuple[SharedSegment, ...]:
    """See TreeOrder; shared[r]: tokens of KV that rows r and r + 1 share."""
    segments = []
    todo = [(0, len(shared) + 1, 0)]  # rows [first, last), whose KV is done up to a token
    while todo:
        first, last, begin = todo.pop()
        if last - first < 2:
            continue
        least = min(shared[first : last - 1])
        end = least - least % page_size
        num_rows = last - first
        if (end - begin) * (num_rows - 1) > cost_tokens * num_rows:
            segments.append(SharedSegment(begin, end, first, last))
            begin = end
        cuts = [i + 1 for i in range(first, last - 1) if shared[i] == least]
        bounds = [first, *cuts, last]
        todo.extend((a, b, begin) for a, b in zip(bounds[-2::-1], bounds[:0:-1], strict=True))
    return tuple(segments)


def _path(node: Node | None) -> Path:
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return tuple(reversed(path))


def _common_end(path: Path, other: Path) -> int:
    """How many tokens two paths share."""
    end = 0
    for node, other_node in zip(path, other, strict=False):
        if node is not other_node:
            break
        end = node.end
    return end
