"""An expression's characters as JSON's lexer sees them, and where in a string its texts end.

These are bounds: a set holds at least what can occur. They are computed once for each rule, leaf
rules first, and once for each part of an expression.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TypeAlias

from .grammar import Alt, And, Chars, Concat, Expression, Literal, Not, Ref, Repeat

MAX_REMEMBERED = 16_384  # compositions of moves; a grammar has few different ones
STRUCTURAL = "{}[],:"
SPACES = " \t\n\r"
QUOTE, BACKSLASH = '"', "\\"


class Kind(IntEnum):
    """A character's role in JSON outside strings."""

    STRUCTURE = 0
    QUOTE = 1
    SPACE = 2
    WORD = 3  # of numbers, true, false, null


class Place(IntEnum):
    """Where in a JSON string token the text so far ends."""

    BEFORE = 0
    INSIDE = 1
    ESCAPE = 2
    BEHIND = 3
    BEYOND = 4  # this is not a string token


Kinds: TypeAlias = frozenset[Kind]
Places: TypeAlias = frozenset[Place]
_Moves: TypeAlias = tuple[Places, ...]  # by the place before

_NEXT_PLACE = {  # at a quote, at a backslash, at any other character
    Place.BEFORE: (Place.INSIDE, Place.BEYOND, Place.BEYOND),
    Place.INSIDE: (Place.BEHIND, Place.ESCAPE, Place.INSIDE),
    Place.ESCAPE: (Place.INSIDE, Place.INSIDE, Place.INSIDE),
    Place.BEHIND: (Place.BEYOND, Place.BEYOND, Place.BEYOND),
    Place.BEYOND: (Place.BEYOND, Place.BEYOND, Place.BEYOND),
}
_STAY: _Moves = tuple(frozenset({place}) for place in Place)
_ANYWHERE: _Moves = (frozenset(Place),) * len(Place)


class JsonShapes:
    """Kinds and places of the parts of one grammar.

    `recursive` names the rules that lead to themselves; nothing is known of these.
    """

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self._known: dict[int, tuple[Expression, Kinds, _Moves]] = {}
        self._of_rule: dict[str, tuple[Kinds, _Moves]] = {}
        for name in from_below(rules):
            self._of_rule[name] = self._shape(rules[name])
        self.recursive = frozenset(rules) - frozenset(self._of_rule)

    def kinds(self, expression: Expression) -> Kinds:
        """Kinds of the characters in its texts."""
        return self._shape(expression)[0]

    def places(self, expression: Expression, before: Places) -> Places:
        """Places where its texts end."""
        moves = self._shape(expression)[1]
        return _union(moves[place] for place in before)

    def _shape(self, expression: Expression) -> tuple[Kinds, _Moves]:
        known = self._known.get(id(expression))
        if known is None:  # cached with the expression, so that its id is not reused
            known = (expression, *self._found(expression))
            self._known[id(expression)] = known
        return known[1:]

    def _found(self, expression: Expression) -> tuple[Kinds, _Moves]:
        if isinstance(expression, Literal):
            columns = [frozenset({_column(character)}) for character in expression.text]
            return frozenset(map(_kind, expression.text)), _along(map(_moved, columns))
        if isinstance(expression, Chars):
            return _kinds_of(expression), _moved(_columns_of(expression))
        if isinstance(expression, Ref):
            return self._of_rule.get(expression.name, (frozenset(Kind), _ANYWHERE))
        if isinstance(expression, Repeat):
            kinds, moves = self._shape(expression.part)
            return kinds, _repeated(moves, expression.least)
        if isinstance(expression, Not):
            return frozenset(Kind), _ANYWHERE
        shapes = [self._shape(part) for part in expression.parts]
        if isinstance(expression, And):
            kinds = frozenset(Kind).intersection(*(kinds for kinds, _ in shapes))
            among = zip(*(moves for _, moves in shapes))
            return kinds, tuple(frozenset(Place).intersection(*places) for places in among)
        kinds = frozenset[Kind]().union(*(kinds for kinds, _ in shapes))
        if isinstance(expression, Concat):
            return kinds, _along(moves for _, moves in shapes)
        return kinds, tuple(_union(moves[place] for _, moves in shapes) for place in Place)


def words_by_rules(rules: Mapping[str, Expression]) -> set[str]:
    """The rules that refer to others and lead only to characters of words: numbers by their
    remainders."""
    words = {name for name, rule in rules.items() if _has_words_only(rule)}
    users: dict[str, list[str]] = {}
    for name in words:
        for reference in references(rules[name]):
            users.setdefault(reference, []).append(name)
    pending = [name for name in users if name not in words]
    while pending:
        for user in users.get(pending.pop(), ()):
            if user in words:
                words.discard(user)
                pending.append(user)
    return {name for name in words if any(references(rules[name]))}


def _has_words_only(expression: Expression) -> bool:
    """Whether its own characters, besides those of the rules it refers to, are of words."""
    match expression:
        case Literal(text):
            return all(_kind(character) == Kind.WORD for character in text)
        case Chars():
            return _kinds_of(expression) <= {Kind.WORD}
        case Concat(parts) | Alt(parts):
            return all(map(_has_words_only, parts))
        case Repeat(part):
            return _has_words_only(part)
        case _:
            return isinstance(expression, Ref)


def from_below(rules: Mapping[str, Expression]) -> Iterable[str]:
    """Names of the rules that never lead to themselves, each after those that it refers to."""
    waiting = {name: set(references(expression)) for name, expression in rules.items()}
    users: dict[str, list[str]] = {}
    for name, used in waiting.items():
        for reference in used:
            users.setdefault(reference, []).append(name)
    ready = [name for name, used in waiting.items() if not used]
    while ready:
        name = ready.pop()
        yield name
        for user in users.get(name, ()):
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)


def references(expression: Expression) -> Iterable[str]:
    """The names of the rules that it refers to, with repetitions."""
    if isinstance(expression, Ref):
        yield expression.name
    elif isinstance(expression, Repeat | Not):
        yield from references(expression.part)
    elif isinstance(expression, Concat | Alt | And):
        for part in expression.parts:
            yield from references(part)


def _union(sets: Iterable[Places]) -> Places:
    return frozenset[Place]().union(*sets)


def _along(steps: Iterable[_Moves]) -> _Moves:
    return functools.reduce(_then, steps, _STAY)


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _then(moves: _Moves, step: _Moves) -> _Moves:
    return tuple(_union(step[place] for place in places) for places in moves)


def _repeated(moves: _Moves, least: int) -> _Moves:
    """Any number of repetitions from `least`: includes the true result for every upper bound."""
    reached = moves if least else _STAY
    while True:
        more = tuple(places | _union(moves[place] for place in places) for places in reached)
        if more == reached:
            return reached
        reached = more


@functools.cache
def _moved(columns: frozenset[int]) -> _Moves:
    return tuple(frozenset(_NEXT_PLACE[place][column] for column in columns) for place in Place)


def _kind(character: str) -> Kind:
    if character in STRUCTURAL:
        return Kind.STRUCTURE
    if character == QUOTE:
        return Kind.QUOTE
    return Kind.SPACE if character in SPACES else Kind.WORD


def _column(character: str) -> int:
    return 0 if character == QUOTE else 1 if character == BACKSLASH else 2


def _kinds_of(chars: Chars) -> Kinds:
    special = [c for c in STRUCTURAL + SPACES + QUOTE if _contains(chars, c)]
    words = {Kind.WORD} if _size(chars) > len(special) else set()
    return frozenset(map(_kind, special)) | words


def _columns_of(chars: Chars) -> frozenset[int]:
    special = [c for c in QUOTE + BACKSLASH if _contains(chars, c)]
    others = {2} if _size(chars) > len(special) else set()
    return frozenset(map(_column, special)) | others


def _size(chars: Chars) -> int:
    return sum(high - low + 1 for low, high in chars.ranges)


def _contains(chars: Chars, character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in chars.ranges)
