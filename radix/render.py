"""A picture of a radix tree for a terminal, from plain data.

Uses only snapshots (RadixTree.snapshot(), or the same rows sent over the network), so a client can
draw a server's tree; the caller's `decode` turns ids into text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .picture import Columns, draw
from .snapshot import FleetNodeSnapshot, NodeSnapshot

__all__ = ["render", "render_fleet"]

_COLUMNS = f"{'tokens':>9} {'locks':>5} {'hits':>6}"
_KEPT, _HOST = f" {'kept':>5}", f" {'host':>9}"  # shown if anything is leased, or on the host


def render(
    snapshot: Sequence[NodeSnapshot],
    decode: Callable[[Sequence[int]], str],
    *,
    width: int | None = 100,
    max_depth: int = 8,
    max_children: int = 8,
) -> str:
    """Draws the tree: a line a node with its text, number of tokens, lock_ref and hits; if any
    exist, also pins and leases, and how many of its first tokens the host has.

    Texts are cut so that a line has at most `width` cells (never under 39, or 54 with all columns;
    None: nothing is cut), `max_depth` levels and `max_children` children a node, the biggest
    subtrees first; omitted nodes are counted. No line break at the end.
    """
    has_leases = any(row["lease_ref"] for row in snapshot)
    has_host = any(row["host_tokens"] for row in snapshot)

    def text(row: NodeSnapshot) -> tuple[str, bool]:
        return decode(row["token_ids"]), len(row["token_ids"]) == row["num_tokens"]

    def cells(row: NodeSnapshot, num_tokens: int, is_root: bool) -> str:
        locks = f"{row['lock_ref']:,}" if row["lock_ref"] else "·"
        hits = "" if is_root else f"{row['hits']:,}"
        line = f"{num_tokens:>9,} {locks:>5} {hits:>6}"
        if has_leases:
            kept = "pin" if row["pin_ref"] else "lease" if row["lease_ref"] else "·"
            line += f" {'' if is_root else kept:>5}"
        if has_host:
            on_host = f"{row['host_tokens']:,}" if row["host_tokens"] else "·"
            line += f" {'' if is_root else on_host:>9}"
        return line

    columns = Columns(_COLUMNS + _KEPT * has_leases + _HOST * has_host, text, cells)
    return draw(snapshot, columns, width=width, max_depth=max_depth, max_children=max_children)


def render_fleet(
    snapshot: Sequence[FleetNodeSnapshot],
    holders: Sequence[str],
    *,
    width: int | None = 100,
    max_depth: int = 8,
    max_children: int = 8,
) -> str:
    """Draws the tree of several caches (`FleetTree.snapshot`) as `render` does: a line a prefix
    with its text, its number of tokens, and the names of those of `holders` that have it."""
    heading = f"{'tokens':>9}  {' '.join(holders)}"

    def text(row: FleetNodeSnapshot) -> tuple[str, bool]:
        return row["text"], not row["is_cut"]

    def cells(row: FleetNodeSnapshot, num_tokens: int, is_root: bool) -> str:
        marks = (name if name in row["holders"] else "·".rjust(len(name)) for name in holders)
        return f"{num_tokens:>9,}  {' '.join(marks)}"

    columns = Columns(heading, text, cells)
    return draw(snapshot, columns, width=width, max_depth=max_depth, max_children=max_children)
