"""A program's ops as a graph: branches in tree order, and the data flow between them.

Knows ops only, not when or whether they ran: used for captures and for reports of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...errors import InvalidProgram
from ..protocol import ir

ROOT = "main"
OpKey = tuple[int, int]  # branch, seq
EdgeKind = Literal["fork", "join", "var"]


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` continues from, waits for, or appends what `origin` made: `names` say what."""

    kind: EdgeKind
    origin: OpKey
    target: OpKey
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """A program's first wait: what it read (as written) and where."""

    reading: str
    branch: int
    source: str | None


@dataclass(slots=True)
class Branch:
    """One branch: `path` is "main" for the root, "main.0" for its first child, and so on."""

    number: int
    path: str
    parent: OpKey | None = None  # the fork it comes from
    depth: int = 0
    ops: list[ir.Op] = field(default_factory=list)
    children: list[int] = field(default_factory=list)


class OpGraph:
    """The ops of one program in the order in which they were sent, and their structure.

    A branch's ops come after the fork that makes it; else InvalidProgram is raised.
    """

    def __init__(self, name: str, ops: Sequence[ir.Op], wait: Wait | None = None) -> None:
        self.name = name
        self.ops = tuple(ops)
        self.wait = wait
        self._branches = _branches(self.ops)
        self._by_key = {(op.branch, op.seq): op for op in self.ops}
        self.edges = tuple(self._edges())

    @property
    def branches(self) -> list[Branch]:
        """Depth first: a branch, then its children in the order of their forks."""
        ordered: list[Branch] = []
        stack = [0]
        while stack:
            branch = self._branches[stack.pop()]
            ordered.append(branch)
            stack += reversed(branch.children)
        return ordered

    def branch(self, number: int) -> Branch:
        """Raises KeyError."""
        return self._branches[number]

    def op(self, key: OpKey) -> ir.Op:
        """Raises KeyError."""
        return self._by_key[key]

    def name_of(self, key: OpKey) -> str:
        """The name of an op's value, or its kind where the author gave no name."""
        op = self._by_key.get(key)
        if op is None:
            return "?"
        return getattr(op, "name", "") or op.kind

    def _edges(self) -> Iterator[Edge]:
        for op in self.ops:
            key = (op.branch, op.seq)
            if isinstance(op, ir.Fork):
                for child in op.children:
                    yield Edge("fork", key, (child, 0))
            elif isinstance(op, ir.Var):
                origin = (op.of_branch, op.of_seq)
                yield Edge("var", origin, key, (self.name_of(origin),))
            elif isinstance(op, ir.Join):
                for child in op.children:
                    yield Edge("join", (child, self._last_seq(child)), key, self._names(child))

    def _last_seq(self, number: int) -> int:
        ops = self._branches[number].ops
        return ops[-1].seq if ops else 0

    def _names(self, number: int) -> tuple[str, ...]:
        ops = self._branches[number].ops
        named = [op.name for op in ops if isinstance(op, ir.Gen | ir.Select) and op.name]
        return tuple(dict.fromkeys(named))


def _branches(ops: Sequence[ir.Op]) -> dict[int, Branch]:
    """By number; every branch but the root comes from one fork."""
    found = {0: Branch(0, ROOT)}
    for op in ops:
        if op.branch not in found:
            raise InvalidProgram.of("branch", op.branch, f"one that was forked: {sorted(found)}")
        branch = found[op.branch]
        branch.ops.append(op)
        if isinstance(op, ir.Fork):
            for number in op.children:
                path = f"{branch.path}.{len(branch.children)}"
                found[number] = Branch(number, path, (op.branch, op.seq), branch.depth + 1)
                branch.children.append(number)
    return found
