"""A program's ops as a graph, exported as text, as a picture or as data."""

from __future__ import annotations

from typing import Any

from .graph_picture import page_of, svg_of
from .graph_text import text_of
from .notebook import framed
from .op_graph import Branch, OpGraph, Wait


class Graph(OpGraph):
    """The ops of one program in the order in which they were sent, and their structure."""

    def to_text(self) -> str:
        """A tree as text: a line per op, branches indented below their fork."""
        return text_of(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data: name, branches (path, parent, ops), edges, and the wait or None."""
        return {
            "name": self.name,
            "branches": [_branch_as_data(branch) for branch in self.branches],
            "edges": [
                {"kind": e.kind, "from": list(e.origin), "to": list(e.target), "names": [*e.names]}
                for e in self.edges
            ],
            "wait": None if self.wait is None else _wait_as_data(self.wait),
        }

    def to_svg(self) -> str:
        """A picture: a standalone SVG file."""
        return svg_of([self])

    def to_html(self) -> str:
        """The picture on a page of its own."""
        return page_of([self])

    def __str__(self) -> str:
        """The same as `to_text()`."""
        return self.to_text()

    def _repr_html_(self) -> str:
        return framed(self.to_html())


def _branch_as_data(branch: Branch) -> dict[str, Any]:
    return {
        "number": branch.number,
        "path": branch.path,
        "parent": None if branch.parent is None else list(branch.parent),
        "ops": [op.to_wire() for op in branch.ops],
    }


def _wait_as_data(wait: Wait) -> dict[str, Any]:
    return {"reading": wait.reading, "branch": wait.branch, "source": wait.source}
