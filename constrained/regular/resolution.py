"""Anchors and lookaheads of a regex, resolved into expressions over the whole text.

A zero-width assertion constrains all the text before or after it, so a regex with assertions is
resolved from its end to its beginning, given the language of the rest of the text: `$` makes the
rest empty, a lookahead is an intersection with the rest, `^` keeps only what holds at the text's
start. A rest is therefore two languages, one for each kind of position.

    resolve(a(?=b)., rest) = a . (b ANYTHING  and  . rest)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...errors import Picklable
from ..grammar import (
    EMPTY_WORD,
    NOTHING,
    Alt,
    And,
    Chars,
    Concat,
    Expression,
    Literal,
    Not,
    Repeat,
    alt,
    concat,
    optional,
    repeat,
)
from .assertions import ANYTHING, ASSERTIONS, Behind, Choice, End, Look, Loop, Node, Sequence, Start
from .charsets import ALL

SOMETHING = Repeat(Chars(ALL), 1, None)
MAX_ASSERTIONS = 50  # counted once per turn of a repetition; nesting grows with them
MAX_TREE_SIZE = 200_000  # nodes, counting shared ones at each use


class Unresolvable(Picklable, Exception):
    """An unsupported use of assertions: what, and its position in the pattern."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


class Rest(NamedTuple):
    """Texts that may follow at the text's start, and elsewhere; one object where they agree."""

    at_start: Expression
    inside: Expression


def resolve(node: Node, *, anchored: bool) -> Expression:
    """The whole texts that match: all of the text, or, unanchored, any stretch of it.

    Raises Unresolvable.
    """
    if not isinstance(node, ASSERTIONS):
        return node if anchored else concat(ANYTHING, node, ANYTHING)
    if _num_assertions(node) > MAX_ASSERTIONS:
        raise Unresolvable(f"more than {MAX_ASSERTIONS} anchors and lookaheads, repeated ones", 0)
    end = EMPTY_WORD if anchored else ANYTHING
    found = _before(node, Rest(end, end))
    if not anchored:
        found = _before(ANYTHING, found)
    if _tree_size(found.at_start) > MAX_TREE_SIZE:
        raise Unresolvable("its lookaheads and anchors multiply to an expression too large", 0)
    return found.at_start


def _before(node: Node, rest: Rest) -> Rest:
    """The rest of the text from the node's beginning, given the rest from its end."""
    match node:
        case Start():
            return Rest(rest.at_start, NOTHING)
        case End():
            return _each(rest, lambda text: _ending(text, node.may_precede_newline))
        case Look():
            ahead = _before(node.body, Rest(ANYTHING, ANYTHING))
            return _both(_each(ahead, Not) if node.is_negative else ahead, rest)
        case Sequence(parts):
            for part in reversed(parts):
                rest = _before(part, rest)
            return rest
        case Choice(parts):
            return _either(*(_before(part, rest) for part in parts))
        case Loop():
            return _before_loop(node, rest)
        case _:
            assert not isinstance(node, Behind), "_num_assertions refuses it"
            return _before_expression(node, rest)


def _before_expression(expression: Expression, rest: Rest) -> Rest:
    inside = concat(expression, rest.inside)
    if rest.at_start is rest.inside or not _is_nullable(expression):
        return Rest(inside, inside)
    if rest.inside == NOTHING:
        return Rest(rest.at_start, NOTHING)
    something = SOMETHING if expression is ANYTHING else And((expression, SOMETHING))
    return Rest(Alt((rest.at_start, concat(something, rest.inside))), inside)


def _before_loop(loop: Loop, rest: Rest) -> Rest:
    after = rest
    if loop.most is None:
        rest = _before_star(loop, rest)
    else:
        for _ in range(loop.most - loop.least):
            rest = _either(after, _before(loop.part, rest))
    for _ in range(loop.least):
        rest = _before(loop.part, rest)
    return rest


def _before_star(loop: Loop, rest: Rest) -> Rest:
    """Within the loop `^` and `$` hold only in the first turn and in the last two: one at the end,
    one more over the newline that may follow Python's `$`."""
    if _has_look(loop.part):
        return _before_tempered(loop, rest)
    last = rest
    for _ in range(2):
        last = _either(rest, _before(loop.part, last))
    inside = concat(repeat(_without_anchors(loop.part), 0), last.inside)
    first = _before(loop.part, Rest(NOTHING, inside)).at_start
    return Rest(_alt(last.at_start, first), inside)


def _before_tempered(loop: Loop, rest: Rest) -> Rest:
    """`((?!P).)*` up to the text's end: no P begins anywhere in the rest."""
    parts = loop.part.parts if isinstance(loop.part, Sequence) else ()
    looks = [part for part in parts[:-1] if isinstance(part, Look)]
    body = parts[-1] if parts else None
    if (
        not isinstance(body, Chars)
        or len(looks) < len(parts) - 1
        or rest != Rest(EMPTY_WORD, EMPTY_WORD)
    ):
        reason = "a lookahead in an unbounded repetition is supported only as ((?!..).)* at the end"
        raise Unresolvable(reason, loop.position)
    forbidden = []
    for look in looks:
        ahead = _before(look.body, Rest(ANYTHING, ANYTHING))
        if ahead.at_start is not ahead.inside:
            raise Unresolvable("^ in a lookahead that is repeated", look.position)
        forbidden.append(ahead.inside if look.is_negative else Not(ahead.inside))
    begins_forbidden = concat(ANYTHING, And((SOMETHING, _alt(*forbidden))))
    inside = And((Repeat(body, 0, None), Not(begins_forbidden)))
    return Rest(inside, inside)


def _each(rest: Rest, change: Callable[[Expression], Expression]) -> Rest:
    inside = change(rest.inside)
    at_start = inside if rest.at_start is rest.inside else change(rest.at_start)
    return Rest(at_start, inside)


def _either(*rests: Rest) -> Rest:
    inside = _alt(*(rest.inside for rest in rests))
    if all(rest.at_start is rest.inside for rest in rests):
        return Rest(inside, inside)
    return Rest(_alt(*(rest.at_start for rest in rests)), inside)


def _both(a: Rest, b: Rest) -> Rest:
    inside = _and(a.inside, b.inside)
    if a.at_start is a.inside and b.at_start is b.inside:
        return Rest(inside, inside)
    return Rest(_and(a.at_start, b.at_start), inside)


def _alt(*parts: Expression) -> Expression:
    """Without comparing parts, which may be large."""
    some = tuple({id(part): part for part in parts if part != NOTHING}.values())
    return some[0] if len(some) == 1 else Alt(some)


def _and(a: Expression, b: Expression) -> Expression:
    if a is ANYTHING or b is ANYTHING:
        return b if a is ANYTHING else a
    if NOTHING in (a, b):
        return NOTHING
    return And((a, b))


def _ending(rest: Expression, may_precede_newline: bool) -> Expression:
    if may_precede_newline and rest != EMPTY_WORD:
        return _and(optional(Literal("\n")), rest)
    return EMPTY_WORD if _is_nullable(rest) else NOTHING


def _is_nullable(expression: Expression) -> bool:
    """Whether the expression, of a kind that a regex can hold, matches the empty text."""
    match expression:
        case Literal(text):
            return not text
        case Concat(parts) | And(parts):
            return all(map(_is_nullable, parts))
        case Alt(parts):
            return any(map(_is_nullable, parts))
        case Repeat(part, least, _):
            return least == 0 or _is_nullable(part)
        case Not(part):
            return not _is_nullable(part)
        case _:
            return False


def _has_look(node: Node) -> bool:
    match node:
        case Look():
            return True
        case Sequence(parts) | Choice(parts):
            return any(map(_has_look, parts))
        case Loop(part):
            return _has_look(part)
        case _:
            return False


def _without_anchors(node: Node) -> Expression:
    """The texts of a part without lookaheads where neither `^` nor `$` holds."""
    match node:
        case Start() | End():
            return NOTHING
        case Sequence(parts):
            return concat(*map(_without_anchors, parts))
        case Choice(parts):
            return alt(*map(_without_anchors, parts))
        case Loop(part, least, most):
            return repeat(_without_anchors(part), least, most)
        case _:
            assert not isinstance(node, ASSERTIONS)
            return node


def _num_assertions(node: Node) -> int:
    """Raises Unresolvable for a lookbehind."""
    match node:
        case Start() | End():
            return 1
        case Look(body):
            return 1 + _num_assertions(body)
        case Behind():
            reason = "a lookbehind is supported only after something at least as long as it"
            raise Unresolvable(reason, node.position)
        case Sequence(parts) | Choice(parts):
            return sum(map(_num_assertions, parts))
        case Loop(part, least, most):
            return _num_assertions(part) * (least + 3 if most is None else most)
        case _:
            return 0


def _tree_size(expression: Expression) -> int:
    """Number of nodes, counting shared ones at each use; each is visited once."""
    sizes: dict[int, int] = {}

    def size(node: Expression) -> int:
        if id(node) not in sizes:
            match node:
                case Concat(parts) | Alt(parts) | And(parts):
                    sizes[id(node)] = 1 + sum(map(size, parts))
                case Repeat(part) | Not(part):
                    sizes[id(node)] = 1 + size(part)
                case _:
                    sizes[id(node)] = 1
        return sizes[id(node)]

    return size(expression)
