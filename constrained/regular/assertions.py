"""A regex after parsing: expressions, and assertions about the text around a position.

Where a lookaround looks no further than its neighbour matches, both become one expression:
`(?!-)[a-z-]+` is an intersection of `[a-z-]+`. `resolution.py` resolves the others, given the rest
of the text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ..grammar import Alt, And, Chars, Concat, Expression, Literal, Not, Repeat, alt, concat
from .charsets import ALL, Ranges

ANYTHING = Repeat(Chars(ALL), 0, None)
_UNBOUNDED = float("inf")
_MAX_OPERANDS = 50  # of lookarounds merged into one neighbour


@dataclass(frozen=True, slots=True)
class Start:
    """`^`: the text begins here, or, under the flag m, a line does, after one of `newlines`."""

    newlines: Ranges = ()


@dataclass(frozen=True, slots=True)
class End:
    """`$`: the text ends here, or, in Python's dialect, after one last newline, or, under the flag
    m, a line does, before one of `newlines`."""

    may_precede_newline: bool = False
    newlines: Ranges = ()


@dataclass(frozen=True, slots=True)
class Boundary:
    """`\\b`: a character of `word` stands on just one side; negative, `\\B`: on both or none. The
    empty text has no position for Python's `\\B`."""

    word: Ranges
    is_negative: bool
    needs_text: bool


@dataclass(frozen=True, slots=True)
class Look:
    """`(?=body)` or `(?!body)`; `position` in the pattern."""

    body: Node
    is_negative: bool
    position: int


@dataclass(frozen=True, slots=True)
class Behind:
    """`(?<=body)` or `(?<!body)`; `position` in the pattern."""

    body: Node
    is_negative: bool
    position: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after another; at least one has assertions."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any of the parts; at least one has assertions."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """A part with assertions, repeated; `position` of the repetition in the pattern."""

    part: Node
    least: int
    most: int | None
    position: int


Assertion: TypeAlias = Start | End | Boundary | Look | Behind | Sequence | Choice | Loop
Node: TypeAlias = Expression | Assertion
ASSERTIONS = (Start, End, Boundary, Look, Behind, Sequence, Choice, Loop)


def sequence(parts: Iterable[Node]) -> Node:
    """A plain expression where no part has assertions."""
    joined: list[Node] = []
    for is_literal, run in itertools.groupby(parts, lambda part: isinstance(part, Literal)):
        nodes = list(run)
        if is_literal:
            nodes = [Literal("".join(part.text for part in nodes if isinstance(part, Literal)))]
        joined += nodes
    joined = _merged(joined)
    plain = [part for part in joined if not isinstance(part, ASSERTIONS)]
    if len(plain) == len(joined):
        return concat(*plain)
    return joined[0] if len(joined) == 1 else Sequence(tuple(joined))


def choice(parts: list[Node]) -> Node:
    """A plain expression where no part has assertions."""
    plain = [part for part in parts if not isinstance(part, ASSERTIONS)]
    if len(plain) == len(parts):
        return alt(*plain)
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _merged(parts: list[Node]) -> list[Node]:
    """Merges each lookaround that looks no further than its neighbours match into these."""
    found: list[Node] = []
    for part in parts:
        if isinstance(part, Behind):
            before = _neighbours(part, reversed(found))
            if before:
                found[-len(before) :] = [_intersection(part, concat(*reversed(before)))]
                continue
        found.append(part)
    for index in range(len(found) - 1, -1, -1):
        look = found[index]
        if isinstance(look, Look):
            after = _neighbours(look, (found[at] for at in range(index + 1, len(found))))
            if after:
                found[index : index + 1 + len(after)] = [_intersection(look, concat(*after))]
    return found


def _neighbours(look: Look | Behind, parts: Iterator[Node]) -> list[Expression]:
    """The fewest first parts that are never shorter than the lookaround; [] if there are none.

    Earlier merged parts count only alone, so that merged expressions do not nest.
    """
    longest = _UNBOUNDED if isinstance(look.body, ASSERTIONS) else lengths(look.body)[1]
    found: list[Expression] = []
    shortest = 0.0
    for part in parts:
        if isinstance(part, ASSERTIONS) or (isinstance(part, And) and not _can_take(part, found)):
            break
        found.append(part)
        shortest += lengths(part)[0]
        if shortest >= longest:
            return found
    return []


def _can_take(merged: And, found: list[Expression]) -> bool:
    return not found and len(merged.parts) < _MAX_OPERANDS


def _intersection(look: Look | Behind, neighbour: Expression) -> Expression:
    assert not isinstance(look.body, ASSERTIONS)
    is_ahead = isinstance(look, Look)
    seen = concat(look.body, ANYTHING) if is_ahead else concat(ANYTHING, look.body)
    operands = neighbour.parts if isinstance(neighbour, And) else (neighbour,)
    return And((*operands, Not(seen) if look.is_negative else seen))


def lengths(expression: Expression) -> tuple[float, float]:
    """Bounds of the number of characters that it matches."""
    match expression:
        case Literal(text):
            return len(text), len(text)
        case Chars():
            return 1, 1
        case Concat(parts):
            shortest, longest = zip(*map(lengths, parts)) if parts else ((0,), (0,))
            return sum(shortest), sum(longest)
        case Alt(parts):
            shortest, longest = zip(*map(lengths, parts)) if parts else ((0,), (0,))
            return min(shortest), max(longest)
        case Repeat(part, least, most):
            short, long = lengths(part)
            return short * least, _UNBOUNDED if most is None else long * most
        case And(parts):
            return max((lengths(part)[0] for part in parts), default=0), _UNBOUNDED
        case _:
            return 0, _UNBOUNDED
