"""The runtime's radix tree as nested HTML lists, the biggest subtrees first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .labels import quoted

MAX_NODES = 150
MAX_TEXT_CHARS = 48


def outline_of(tree: Mapping[str, Any], max_nodes: int = MAX_NODES) -> str:
    """For `backend.tree()`: rows with id, parent, num_tokens, hits and text, parents first.

    At most `max_nodes` nodes; states how many are left out.
    """
    rows: Sequence[Mapping[str, Any]] = tree.get("nodes", ())
    sizes = _subtree_sizes(rows)
    children: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        children.setdefault(row["parent"], []).append(row)
    largest = sorted(rows, key=lambda row: -sizes[row["id"]])[:max_nodes]
    kept = {row["id"] for row in largest}  # each node's parent is included, as it is no smaller
    parts: list[str] = []
    todo: list[Any] = _opened(None, children, sizes, kept)
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        parts.append(f"<li>{_line(item)}")
        todo += ["</li>", *_opened(item["id"], children, sizes, kept)]
    hidden = len(rows) - len(kept)
    more = f"<p>… and {hidden:,} smaller nodes</p>" if hidden else ""
    cached = tree.get("cached_tokens")
    title = f"The radix tree at the end: {len(rows):,} nodes"
    title += "" if cached is None else f", {cached:,} tokens"
    return (
        f"<details><summary>{title}</summary>"
        f'<div class="tree radix">{"".join(parts)}{more}</div></details>'
    )


def _subtree_sizes(rows: Sequence[Mapping[str, Any]]) -> dict[Any, int]:
    sizes = {row["id"]: int(row["num_tokens"]) for row in rows}
    for row in reversed(rows):
        if row["parent"] in sizes:
            sizes[row["parent"]] += sizes[row["id"]]
    return sizes


def _opened(
    parent: Any,
    children: Mapping[Any, list[Mapping[str, Any]]],
    sizes: Mapping[Any, int],
    kept: set[Any],
) -> list[Any]:
    """The list of a node's children, as a work list from last to first."""
    shown = [row for row in children.get(parent, ()) if row["id"] in kept]
    if not shown:
        return []
    return ["</ul>", *sorted(shown, key=lambda row: sizes[row["id"]]), "<ul>"]


def _line(row: Mapping[str, Any]) -> str:
    if row["parent"] is None:
        return escape(str(row.get("namespace") or "(default)"))
    text = quoted(str(row.get("text", "")), MAX_TEXT_CHARS)
    use = f"{row.get('hits', 0):,} hits"
    if "holders" in row:  # of several engines
        use = f"on replica {', '.join(row['holders'])}"
    return f"{escape(text)} <small>{row['num_tokens']:,} tokens, {use}</small>"
