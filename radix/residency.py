"""What a colder tier's tree shares with a hotter one's, and what only it has: one walk over both.

Cost: O(the colder nodes given), each a descent in the hotter tree along its own run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from .node import Node
from .tree import RadixTree

__all__ = ["ColderRun", "Residency", "residency"]


class ColderRun(NamedTuple):
    """The last `num_tokens` of a colder node's run, which the hotter tier does not have."""

    node: Node
    num_tokens: int
    above: Node | None  # the hotter node above it; None: another colder run


class Residency(NamedTuple):
    """The result for the given nodes."""

    num_shared: dict[int, int]  # hotter node's id: how many of its first tokens are there too
    only_colder: list[ColderRun]  # parents first


class _Cursor(NamedTuple):
    """How far the hotter tree has a colder path: to `node`, and `tail` tokens below it, which end
    within a run. node None: the path has left that tree."""

    node: Node | None
    tail: array[int]


def residency(hotter: RadixTree, colder: Iterable[Node]) -> Residency:
    """`colder`: nodes of the other tree, each after its parent, including roots."""
    num_shared: dict[int, int] = {}
    only: list[ColderRun] = []
    cursors: dict[int, _Cursor] = {}
    for node in colder:
        if node.parent is None:
            cursors[node.id] = _Cursor(hotter.roots.get(node.namespace), array("i"))
            continue
        before = cursors[node.parent.id]
        cursors[node.id] = _step(hotter, node, before, num_shared, only)
    return Residency(num_shared, only)


def _step(
    hotter: RadixTree,
    node: Node,
    before: _Cursor,
    num_shared: dict[int, int],
    only: list[ColderRun],
) -> _Cursor:
    num_tokens = len(node.token_ids)
    if before.node is None:
        only.append(ColderRun(node, num_tokens, None))
        return before
    run = before.tail + node.token_ids
    path, end = hotter.descend(before.node, run)
    for step in path:
        num_there = min(end, step.end) - step.start
        num_shared[step.id] = max(num_there, num_shared.get(step.id, 0))
    num_missing = before.node.end + len(run) - end
    if num_missing:
        only.append(ColderRun(node, num_missing, path[-1] if path else before.node))
        return _Cursor(None, array("i"))
    whole = [step for step in path if step.end <= end]
    last = whole[-1] if whole else before.node
    return _Cursor(last, run[len(run) - (end - last.end) :])
