"""A picture of a radix tree for a terminal, from plain data.

Uses only snapshots (RadixTree.snapshot(), or the same rows sent over the network), so a client can
draw a server's tree; the caller's `decode` turns ids into text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .snapshot import NodeSnapshot

__all__ = ["render"]

_COLUMNS = f"{'tokens':>9} {'locks':>5} {'hits':>6}"
_KEPT, _HOST = f" {'kept':>5}", f" {'host':>9}"  # shown if anything is leased, or on the host


def render(
    snapshot: Sequence[NodeSnapshot],
    decode: Callable[[Sequence[int]], str],
    *,
    width: int = 100,
    max_depth: int = 8,
    max_children: int = 8,
) -> str:
    """Draws the tree: a line a node with its text, number of tokens, lock_ref and hits; if any
    exist, also pins and leases, and how many of its first tokens the host has.

    At most `width` cells a line (never under 39, or 54 with all columns), `max_depth` levels and
    `max_children` children a node, the biggest subtrees first; omitted nodes are counted. No line
    break at the end.
    """
    roots = _subtrees(snapshot)
    if not roots:
        return "(empty)"
    has_leases = any(row["lease_ref"] for row in snapshot)
    has_host = any(row["host_tokens"] for row in snapshot)
    columns = _COLUMNS + _KEPT * has_leases + _HOST * has_host
    text_width = max(width - len(columns) - 1, 16)
    picture = _Picture(decode, text_width, max_depth, max_children, has_leases, has_host)
    lines = [f"{'':{picture.text_width}} {columns}"]
    for root in roots:
        name = root.row["namespace"] or "(default)"
        lines.append(picture.line(name, root.total_tokens, root.row, is_root=True))
        lines.extend(picture.below(root))
    return "\n".join(line.rstrip() for line in lines)


@dataclass(slots=True)
class _Subtree:
    row: NodeSnapshot
    children: list[_Subtree] = field(default_factory=list)
    total_tokens: int = 0
    total_nodes: int = 1


def _subtrees(snapshot: Sequence[NodeSnapshot]) -> list[_Subtree]:
    """The roots with their subtrees; sizes are summed from the last row, as parents come first."""
    by_id = {row["id"]: _Subtree(row, total_tokens=row["num_tokens"]) for row in snapshot}
    roots: list[_Subtree] = []
    for row in snapshot:
        siblings = roots if row["parent"] is None else by_id[row["parent"]].children
        siblings.append(by_id[row["id"]])
    for row in reversed(snapshot):
        if row["parent"] is not None:
            above, below = by_id[row["parent"]], by_id[row["id"]]
            above.total_tokens += below.total_tokens
            above.total_nodes += below.total_nodes
    return roots


@dataclass(frozen=True, slots=True)
class _Picture:
    decode: Callable[[Sequence[int]], str]
    text_width: int
    max_depth: int
    max_children: int
    has_leases: bool
    has_host: bool

    def below(self, top: _Subtree) -> list[str]:
        """The lines of everything under `top`, depth first; a long chain costs no recursion."""
        lines: list[str] = []
        stack = [(item, "", 1) for item in reversed(self._branches(top, 1))]
        while stack:
            (subtree, hidden, is_last), indent, depth = stack.pop()
            joint = "└─ " if is_last else "├─ "
            if subtree is None:
                lines.append(_fit(indent + joint + hidden, self.text_width))
                continue
            row = subtree.row
            room = self.text_width - _cells(indent + joint)
            label = indent + joint + self._text(row, room)
            lines.append(self.line(label, row["num_tokens"], row))
            deeper = indent + ("   " if is_last else "│  ")
            branches = self._branches(subtree, depth + 1)
            stack.extend((item, deeper, depth + 1) for item in reversed(branches))
        return lines

    def _branches(self, subtree: _Subtree, depth: int) -> list[tuple[_Subtree | None, str, bool]]:
        """The children to draw as (child, "", is_last), and (None, summary of the hidden, True)."""
        ranked = sorted(subtree.children, key=lambda child: -child.total_tokens)
        num_shown = self.max_children if depth <= self.max_depth else 0
        shown, hidden = ranked[:num_shown], ranked[num_shown:]
        branches: list[tuple[_Subtree | None, str, bool]] = [(child, "", False) for child in shown]
        if hidden:
            num_nodes = sum(child.total_nodes for child in hidden)
            num_tokens = sum(child.total_tokens for child in hidden)
            plural = "" if num_nodes == 1 else "s"
            branches.append(
                (None, f"… {num_nodes:,} more node{plural}, {num_tokens:,} tokens", True)
            )
        elif branches:
            branches[-1] = (branches[-1][0], "", True)
        return branches

    def _text(self, row: NodeSnapshot, room: int) -> str:
        """The run's text on one line, quoted, cut to `room` cells with an ellipsis if needed."""
        text = _one_line(self.decode(row["token_ids"]))
        is_whole = len(row["token_ids"]) == row["num_tokens"]
        if is_whole and _cells(text) + 2 <= room:
            return f'"{text}"'
        return f'"{_cut(text, room - 3)}…"'

    def line(self, label: str, num_tokens: int, row: NodeSnapshot, *, is_root: bool = False) -> str:
        locks = f"{row['lock_ref']:,}" if row["lock_ref"] else "·"
        hits = "" if is_root else f"{row['hits']:,}"
        line = f"{_fit(label, self.text_width)} {num_tokens:>9,} {locks:>5} {hits:>6}"
        if self.has_leases:
            kept = "pin" if row["pin_ref"] else "lease" if row["lease_ref"] else "·"
            line += f" {'' if is_root else kept:>5}"
        if self.has_host:
            on_host = f"{row['host_tokens']:,}" if row["host_tokens"] else "·"
            line += f" {'' if is_root else on_host:>9}"
        return line


def _one_line(text: str) -> str:
    """Line breaks, tabs and unprintable characters as escapes, so that a run stays on its line."""
    escapes = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(
        escapes.get(char) or (char if char.isprintable() else f"\\x{ord(char):02x}")
        for char in text
    )


def _cells(text: str) -> int:
    """Terminal cells: wide characters take two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(map(_cell, text))


def _cell(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cut(text: str, num_cells: int) -> str:
    """The longest prefix that takes at most `num_cells`."""
    used = 0
    for index, char in enumerate(text):
        used += _cell(char)
        if used > num_cells:
            return text[:index]
    return text


def _fit(text: str, num_cells: int) -> str:
    """Exactly `num_cells` wide: cut or padded."""
    text = _cut(text, num_cells)
    return text + " " * (num_cells - _cells(text))
