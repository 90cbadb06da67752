"""What a regex is parsed to: expressions, and assertions about the text around a position.

Where a lookaround asks for no more than its neighbour matches anyway, both become one expression:
`(?!-)[a-z-]+` is an intersection of `[a-z-]+`. The others wait for the rest of the text, in
`resolution.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..grammar import Alt, And, Chars, Concat, Expression, Literal, Not, Repeat, alt, concat
from .charsets import ALL

ANYTHING = Repeat(Chars(ALL), 0, None)
_UNBOUNDED = float("inf")


@dataclass(frozen=True, slots=True)
class Start:
    """`^`: here the text begins."""


@dataclass(frozen=True, slots=True)
class End:
    """`$`: here the text ends, or where Python says so, a last newline follows."""

    may_precede_newline: bool = False


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
    """One after the other; at least one part has assertions."""

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


Assertion: TypeAlias = Start | End | Look | Behind | Sequence | Choice | Loop
Node: TypeAlias = Expression | Assertion
ASSERTIONS = (Start, End, Look, Behind, Sequence, Choice, Loop)


def sequence(parts: Iterable[Node]) -> Node:
    """An expression where no part has assertions."""
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
    """An expression where no part has assertions."""
    plain = [part for part in parts if not isinstance(part, ASSERTIONS)]
    if len(plain) == len(parts):
        return alt(*plain)
    return parts[0] if len(parts) == 1 else Choice(tuple(parts))


def _merged(parts: list[Node]) -> list[Node]:
    """With every lookaround merged into its neighbour that asks for no more than that matches."""
    found: list[Node] = []
    for part in parts:
        found.append(part)
        if isinstance(part, Behind):
            before = _plain_run(reversed(found[:-1]))
            both = _intersection(part, concat(*reversed(before)))
            if both is not None:
                found[len(found) - 1 - len(before) :] = [both]
    for index in range(len(found) - 1, -1, -1):
        part = found[index]
        if isinstance(part, Look):
            after = _plain_run(found[index + 1 :])
            both = _intersection(part, concat(*after))
            if both is not None:
                found[index : index + 1 + len(after)] = [both]
    return found


def _plain_run(parts: Iterable[Node]) -> list[Expression]:
    run: list[Expression] = []
    for part in parts:
        if isinstance(part, ASSERTIONS):
            break
        run.append(part)
    return run


def _intersection(look: Look | Behind, neighbour: Expression) -> Expression | None:
    """None where the lookaround may see beyond its neighbour."""
    body = look.body
    if isinstance(body, ASSERTIONS) or _lengths(body)[1] > _lengths(neighbour)[0]:
        return None
    parts = (body, ANYTHING) if isinstance(look, Look) else (ANYTHING, body)
    seen = concat(*parts)
    return And((neighbour, Not(seen) if look.is_negative else seen))


def _lengths(expression: Expression) -> tuple[float, float]:
    """Bounds of the number of characters that it matches."""
    match expression:
        case Literal(text):
            return len(text), len(text)
        case Chars():
            return 1, 1
        case Concat(parts):
            shortest, longest = zip(*map(_lengths, parts)) if parts else ((0,), (0,))
            return sum(shortest), sum(longest)
        case Alt(parts):
            shortest, longest = zip(*map(_lengths, parts)) if parts else ((0,), (0,))
            return min(shortest), max(longest)
        case Repeat(part, least, most):
            short, long = _lengths(part)
            return short * least, _UNBOUNDED if most is None else long * most
        case And(parts):
            return max((_lengths(part)[0] for part in parts), default=0), _UNBOUNDED
        case _:
            return 0, _UNBOUNDED
