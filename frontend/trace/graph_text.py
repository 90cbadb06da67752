"""A captured graph as text: a line per op, branches indented below the fork that makes them."""

from __future__ import annotations

from collections.abc import Iterator

from ..protocol import ir
from .labels import label_of, plural, short_source
from .op_graph import Branch, OpGraph

WIDTH = 100
_LEAST_GAP = 2


def text_of(graph: OpGraph, width: int = WIDTH) -> str:
    """No line break at the end; source lines are at the right, `width` cells away, or behind what
    takes more."""
    lines = [_fit(line, source, width) for line, source in _lines(graph)]
    head = f"{graph.name}: {_counts(graph)}"
    return "\n".join([head, *lines])


def _counts(graph: OpGraph) -> str:
    num_calls = sum(isinstance(op, ir.Gen | ir.Select) for op in graph.ops)
    return (
        f"{plural(len(graph.ops), 'op')}, {plural(num_calls, 'call')}, "
        f"{plural(len(graph.branches), 'branch', 'branches')} "
        f"{'up to the first wait' if graph.wait else 'in one message; it never waits'}"
    )


def _lines(graph: OpGraph) -> Iterator[tuple[str, str]]:
    """(line, source) depth first; a branch's ops are indented by its depth and by open roles."""
    stack: list[Iterator[tuple[str, str] | Branch]] = [_branch_lines(graph, graph.branch(0))]
    while stack:
        item = next(stack[-1], None)
        if item is None:
            stack.pop()
        elif isinstance(item, Branch):
            stack.append(_branch_lines(graph, item))
        else:
            yield item


def _branch_lines(graph: OpGraph, branch: Branch) -> Iterator[tuple[str, str] | Branch]:
    indent = "    " * branch.depth
    yield f"{indent}{branch.path}", ""
    open_roles = 0
    for op in branch.ops:
        if isinstance(op, ir.RoleEnd):
            open_roles -= 1
            continue
        kind, details = label_of(op)
        margin = indent + "  " * (max(open_roles, 0) + 1)
        line = f"{margin}{kind:<6} {details}{_flow(graph, op)}".rstrip()
        yield line, short_source(op.source)
        open_roles += isinstance(op, ir.RoleBegin)
        if isinstance(op, ir.Fork):
            yield from (graph.branch(child) for child in op.children)
    if graph.wait is not None and graph.wait.branch == branch.number:
        yield f"{indent}  waits  {graph.wait.reading}", short_source(graph.wait.source)


def _flow(graph: OpGraph, op: ir.Op) -> str:
    """The origin of the op's inputs, and the name of its value."""
    if isinstance(op, ir.Var):
        origin = (op.of_branch, op.of_seq)
        return f"{graph.name_of(origin)} <- {graph.branch(op.of_branch).path}"
    if isinstance(op, ir.Join):
        edges = [e for e in graph.edges if e.kind == "join" and e.target == (op.branch, op.seq)]
        paths = [graph.branch(edge.origin[0]).path for edge in edges]
        names = dict.fromkeys(name for edge in edges for name in edge.names)
        gathered = f" -> {', '.join(f'{name}[]' for name in names)}" if names else ""
        return f" <- {_listed(paths)}{gathered}"
    return ""


def _listed(paths: list[str]) -> str:
    if len(paths) <= 4:
        return ", ".join(paths)
    return f"{paths[0]} … {paths[-1]} ({len(paths)})"


def _fit(line: str, source: str, width: int) -> str:
    if not source:
        return line
    room = max(width - len(source), len(line) + _LEAST_GAP)
    return f"{line:<{room}}{source}"
