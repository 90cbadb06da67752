"""The branches of one fork: a list that can be appended to as a whole, and joined."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, overload

from ...errors import InvalidProgram
from ..client.values import Gathered
from ..protocol import ir
from ..protocol.numbers import Range
from .expr import Appendable, Expr
from .source_lines import source_line
from .writing import BranchWriter

FORK_SIZES = Range(1, 65_536, is_whole=True)

S = TypeVar("S", bound=BranchWriter)
ForEach: TypeAlias = Appendable | Sequence[Appendable] | Callable[[int], Appendable]


@dataclass(frozen=True, slots=True)
class First:
    """A join that needs only `num_needed` of its branches."""

    num_needed: int
    mode: ir.JoinMode


def first(num_needed: int, mode: ir.JoinMode = "gather_variable") -> First:
    """`forks.join(st.first(2))`: the first two branches that succeed are enough; the others are
    stopped at once, and those that are paused do not count. The join fails when fewer can still
    succeed."""
    return First(FORK_SIZES.checked("num_needed", num_needed), mode)


class Forks(Generic[S]):
    """Several branches of one parent."""

    def __init__(self, parent: S, children: list[S]) -> None:
        self._parent = parent
        self._children = children

    def __len__(self) -> int:
        return len(self._children)

    def __str__(self) -> str:
        raise InvalidProgram(
            f"{len(self)} forks have no one text to put into a string: use that of each, as in "
            'forks[0].text(), or join them and use the values, as in s["x"]'
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> Forks[S]: ...
    def __getitem__(self, index: int | slice) -> S | Forks[S]:
        """One branch, or several, which can be appended to and joined separately."""
        if isinstance(index, slice):
            return Forks(self._parent, self._children[index])
        return self._children[index]

    def __setitem__(self, index: int | slice, child: S | Forks[S]) -> None:
        """The last step of `forks[i] += ...`; a branch cannot be replaced."""
        if isinstance(index, slice):
            is_same = isinstance(child, Forks) and child._children == self._children[index]
        else:
            is_same = child is self._children[index]
        if not is_same:
            raise InvalidProgram("a branch of a fork cannot be replaced, only appended to")

    def __iter__(self) -> Iterator[S]:
        return iter(self._children)

    def __iadd__(self, other: ForEach) -> Forks[S]:
        """Append to each branch: the same for all, an item of a list each, or what a function of
        the branch's index returns."""
        source = source_line(sys._getframe(1))
        if isinstance(other, str | Expr) or other is None:
            items: Sequence[Appendable] = [other] * len(self)
        elif callable(other):
            items = [other(index) for index in range(len(self))]
        elif isinstance(other, Sequence) and len(other) == len(self):
            items = other
        else:
            raise InvalidProgram.of("forks +=", other, f"one item for each of {len(self)} branches")
        for child, item in zip(self._children, items, strict=True):
            child._append(item, source)
        return self

    def join(self, mode: ir.JoinMode | First = "gather_variable") -> None:
        """End the branches and wait for them in the runtime (not here).

        "gather_variable": each value made in the branches becomes a list on the parent, in the
        order of the branches, with None for a branch that has not made it. "concate_and_append":
        the text that each branch appended since the fork is appended to the parent. A failed branch
        fails the join, at the parent's next wait.
        With `st.first(k)` only the first k branches to succeed count, still in their order. One
        that is paused, as in a tool on another thread, has not ended: it is stopped. Raises
        InvalidProgram where fewer than k are not paused.
        """
        num_needed = mode.num_needed if isinstance(mode, First) else None
        mode = mode.mode if isinstance(mode, First) else mode
        if mode not in ir.JOIN_MODES:
            raise InvalidProgram.of("mode", mode, f"one of {ir.JOIN_MODES}")
        if num_needed is not None and num_needed > len(self):
            raise InvalidProgram.of("num_needed", num_needed, f"at most {len(self)}, the branches")
        source = source_line(sys._getframe(1))
        children = self._children if num_needed is None else self._stop_paused(num_needed)
        for child in children:
            child._end(source)
        parent = self._parent
        numbers = tuple(child._branch for child in children)
        op = ir.Join(parent._branch, parent._next(), source, numbers, mode, num_needed)
        pending = parent._send(op)
        if num_needed is not None:
            parent._program.ignore_errors_of(numbers)
        parent._note(pending)
        if mode == "gather_variable":
            names = {name: None for child in self._children for name in child._own_vars}
            for name in names:
                items = tuple(child._own_vars.get(name) for child in children)
                parent._vars[name] = parent._own_vars[name] = Gathered(pending, items)

    def _stop_paused(self, num_needed: int) -> list[S]:
        """Stop the branches that are paused; returns the others."""
        others = [child for child in self._children if not child._num_pauses]
        if len(others) < num_needed:
            raise InvalidProgram(
                f"join: {num_needed} branches are needed, and {len(self) - len(others)} of "
                f"{len(self)} are paused, as in a tool: let what works in them end before the join"
            )
        for child in self._children:
            if child._num_pauses:
                child._drop()
        return others


def require_no_offsets(offsets: Sequence[int] | None) -> None:
    """Raises InvalidProgram for an offset of positions: offsets are not supported."""
    if offsets is not None and any(offsets):
        allowed = "None: the branches of a fork go on at the position where it is"
        raise InvalidProgram.of("position_ids_offset", offsets, allowed)
