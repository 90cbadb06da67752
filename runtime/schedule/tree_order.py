"""Orders rows by the radix tree, and finds the KV that neighbouring rows share.

Depth-first order puts the users of a node next to each other, at every level at once. Two
neighbours share the tokens up to where their paths part, so the shared runs are the intervals of
that array of lengths, nested like the tree (the lcp-interval tree of suffix arrays: Abouelhoda,
Kurtz and Ohlebusch 2004). A run becomes a segment, whose attention is computed once for all its
rows, if that saves more than it costs: n rows that share L tokens read L of them instead of n L,
and each row has one more partial result to merge. A run that does not pay is left to the rows, or
joined to the longer run of fewer rows below it.

Cost: O(rows * depth) for the paths, O(rows * levels) for the segments.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...radix.tree import Node
from .plan import SharedSegment
from .request import Request

Path = tuple[Node, ...]  # from below the root to the request's node


def depth_first(requests: Sequence[Request]) -> tuple[list[int], list[Path]]:
    """Indices of `requests` in depth-first order of the tree, and the paths in that order."""
    paths = [_path(request.node) for request in requests]
    keys = [tuple([node.id for node in path]) for path in paths]
    order = sorted(range(len(requests)), key=keys.__getitem__)
    return order, [paths[index] for index in order]


def shared_segments(
    paths: Sequence[Path], starts: Sequence[int], page_size: int, cost_tokens: int
) -> tuple[SharedSegment, ...]:
    """The segments that pay, outermost first.

    starts[r]: position of row r's first query; tokens that a row computes in this step are not
    shared, since its own queries may see only part of them. `cost_tokens`: a row's cost of being in
    a segment, in tokens whose KV could be read in that time.
    """
    shared = [
        min(_common_end(path, below), start, start_below)
        for path, below, start, start_below in zip(
            paths[:-1], paths[1:], starts[:-1], starts[1:], strict=True
        )
    ]
    segments = []
    todo = [(0, len(paths), 0)]  # rows [first, last), whose KV is done up to a token
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
