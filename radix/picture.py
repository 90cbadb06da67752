"""A picture of a forest for a terminal: a line a node, its text, and columns behind it.

Knows neither tokens' ids nor what the columns say: `Columns` does, for one kind of rows.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .snapshot import TreeRow

__all__ = ["Columns", "draw"]

R = TypeVar("R", bound=TreeRow)


@dataclass(frozen=True, slots=True)
class Columns(Generic[R]):
    """What is said of a row."""

    heading: str
    text: Callable[[R], tuple[str, bool]]  # of its run, and whether that is all of it
    cells: Callable[[R, int, bool], str]  # of the row, its number of tokens, whether it is a root


def draw(
    rows: Sequence[R], columns: Columns[R], *, width: int | None, max_depth: int, max_children: int
) -> str:
    """Draws rows, parents first: texts cut so that a line has at most `width` cells (never under 17
    more than the columns take; None: as many as it takes), `max_depth` levels and `max_children`
    children a node, the biggest subtrees first; omitted nodes are counted. No line break at the
    end."""
    roots = _subtrees(rows)
    if not roots:
        return "(empty)"
    text_width = None if width is None else max(width - len(columns.heading) - 1, 16)
    picture = _Picture(columns, text_width, max_depth, max_children)
    lines = [("", columns.heading)]
    for root in roots:
        name = root.row["namespace"] or "(default)"
        lines.append((name, columns.cells(root.row, root.total_tokens, True)))
        lines.extend(picture.below(root))
    if text_width is None:
        text_width = max(_cells(label) for label, cells in lines)
    return "\n".join(_line(label, cells, text_width) for label, cells in lines)


@dataclass(slots=True)
class _Subtree(Generic[R]):
    row: R
    children: list[_Subtree[R]] = field(default_factory=list)
    total_tokens: int = 0
    total_nodes: int = 1


def _subtrees(rows: Sequence[R]) -> list[_Subtree[R]]:
    """The roots with their subtrees; sizes are summed from the last row, as parents come first."""
    by_id = {row["id"]: _Subtree(row, total_tokens=row["num_tokens"]) for row in rows}
    roots: list[_Subtree[R]] = []
    for row in rows:
        siblings = roots if row["parent"] is None else by_id[row["parent"]].children
        siblings.append(by_id[row["id"]])
    for row in reversed(rows):
        if row["parent"] is not None:
            above, below = by_id[row["parent"]], by_id[row["id"]]
            above.total_tokens += below.total_tokens
            above.total_nodes += below.total_nodes
    return roots


@dataclass(frozen=True, slots=True)
class _Picture(Generic[R]):
    columns: Columns[R]
    text_width: int | None
    max_depth: int
    max_children: int

    def below(self, top: _Subtree[R]) -> list[tuple[str, str]]:
        """Labels and cells of everything under `top`, depth first; a long chain costs no recursion.
        A label without cells is never cut."""
        lines: list[tuple[str, str]] = []
        stack = [(item, "", 1) for item in reversed(self._branches(top, 1))]
        while stack:
            (subtree, hidden, is_last), indent, depth = stack.pop()
            joint = "└─ " if is_last else "├─ "
            if subtree is None:
                lines.append((indent + joint + hidden, ""))
                continue
            row = subtree.row
            label = indent + joint + self._text(row, _cells(indent + joint))
            lines.append((label, self.columns.cells(row, row["num_tokens"], False)))
            deeper = indent + ("   " if is_last else "│  ")
            branches = self._branches(subtree, depth + 1)
            stack.extend((item, deeper, depth + 1) for item in reversed(branches))
        return lines

    def _branches(
        self, subtree: _Subtree[R], depth: int
    ) -> list[tuple[_Subtree[R] | None, str, bool]]:
        """The children to draw as (child, "", is_last), and (None, summary of the hidden, True)."""
        ranked = sorted(subtree.children, key=lambda child: -child.total_tokens)
        num_shown = self.max_children if depth <= self.max_depth else 0
        shown, hidden = ranked[:num_shown], ranked[num_shown:]
        branches: list[tuple[_Subtree[R] | None, str, bool]] = [
            (child, "", False) for child in shown
        ]
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

    def _text(self, row: R, indent: int) -> str:
        """The run's text on one line, quoted, cut with an ellipsis to what fits behind `indent`
        cells. An ellipsis is also behind a text that is not all of the run's."""
        text, is_whole = self.columns.text(row)
        text = _one_line(text)
        room = _cells(text) + 3 if self.text_width is None else self.text_width - indent
        if is_whole and _cells(text) + 2 <= room:
            return f'"{text}"'
        return f'"{_cut(text, room - 3)}…"'


def _line(label: str, cells: str, text_width: int) -> str:
    """A label in its column, then cells; without cells it takes what it needs."""
    return (f"{_fit(label, text_width)} {cells}" if cells else label).rstrip()


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
