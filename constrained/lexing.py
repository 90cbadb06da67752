"""Cuts the rules of a grammar into terminals that a greedy lexer keeps apart; writes them in Lark.

The parser's lexer takes as many bytes as any terminal allowed there can use, and never goes back.
It reads a grammar right where no terminal can swallow what follows another: for terminals `a` and
`b` allowed at the same place, a text `t` of `a`, and a byte `c` that may follow it, `tc` begins no
text of `b`. Then, by induction along a text, each terminal of its derivation ends where the
lexer ends it.

So each rule is one terminal where it is regular; those that swallow are cut into their parts, and
these again, in the end into single characters, which swallow nothing. Which terminals are allowed
at the same place, and what may follow them, is known from above: the first ones of all, those
behind the same terminal, and those behind two that share a text and a place. The rest is a walk
over the pairs of states of two automata.

Cost: a round for each depth of cutting; in a round a walk for each new pair of terminals.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

import numpy as np

from ..errors import InvalidGrammar
from .grammar import (
    EMPTY_WORD,
    Alt,
    And,
    Chars,
    Concat,
    Expression,
    Grammar,
    Literal,
    Not,
    Ref,
    Repeat,
    repeat,
)
from .json_tokens import from_below
from .lark import LarkWriter
from .regular.build import TooManyStates, build_dfa
from .regular.charsets import ALL
from .regular.dfa import DEAD, Dfa

MAX_TERMINAL_PARTS = 10_000  # of an expression with the rules that it refers to
MAX_TERMINAL_STATES = 20_000
MAX_PAIRS = 20_000  # of states in a walk; past them two terminals count as swallowing

_RUN = re.compile(r"\w+|\s+|[^\w\s]+")
_SOME_TEXT = Repeat(Chars(ALL), 1, None)


Cuts: TypeAlias = Mapping[Expression, tuple[Expression, ...]]
"""Expressions that are no terminals, each with its parts; () where these are its own."""


def rules_to_lark(
    grammar: Grammar, cuts: Cuts | None = None, documents: Set[str] = frozenset()
) -> str:
    """The Lark text of exactly the grammar's language; `cuts`: those to begin with; `documents`:
    the rules of JSON documents in it, where brackets tell whether one ends. Raises
    InvalidGrammar."""
    cut = _Cut(grammar, cuts or {}, documents)
    cut.keep_apart()
    writer = LarkWriter()
    writer.line("start", _Writing(writer, grammar, cut).written(grammar.start))
    return writer.text()


def swallowing(grammar: Grammar, cuts: Cuts) -> set[tuple[Expression, Expression]]:
    """Terminals that swallow what follows others: pairs of the one whose text ends and the one that
    goes on; one that is too large to be judged with itself. `cuts`: all that is no terminal."""
    cut = _Cut(grammar, cuts, frozenset())
    return {(one.expression, other.expression) for one, other in cut.swallowing()}


@dataclass(slots=True, eq=False)
class _Symbol:
    """What is known of an expression; equal ones share it."""

    expression: Expression
    is_terminal: bool  # or one with the empty text beside it
    is_nullable: bool = False  # of a terminal
    pieces: tuple[Expression, ...] = ()  # found when it is cut
    automaton: _Automaton | None = None  # of a terminal, found when it is needed
    is_inner: bool = False  # of a document
    # Terminals that may follow it; behind a document's last one either those of the document, in
    # which it is nested, or those behind: never both at one place of a text.
    within: set[_Symbol] = field(default_factory=set)
    behind: set[_Symbol] = field(default_factory=set)

    @property
    def follow(self) -> set[_Symbol]:
        return self.within | self.behind


@dataclass(slots=True)
class _Sides:
    """Which terminals an expression may begin and end with, and whether it may be empty."""

    first: set[_Symbol] = field(default_factory=set)
    last: set[_Symbol] = field(default_factory=set)
    is_nullable: bool = False

    def size(self) -> int:
        return 1 + len(self.first) + len(self.last) + self.is_nullable


class _Cut:
    """Where the rules of a grammar are cut into terminals.

    Invariant: a terminal leads to no recursive rule; once `keep_apart` has returned, none swallows
    anything.
    """

    def __init__(self, grammar: Grammar, cuts: Cuts, documents: Set[str]) -> None:
        self._documents = documents
        self._rules = grammar.rules
        self._start = grammar.start
        self._given = cuts
        self._sizes: dict[str, int] = {}
        self._nullable: dict[str, bool] = {}
        self._free: dict[str, bool] = {}
        for name in from_below(grammar.rules):
            self._sizes[name] = self._size(grammar.rules[name])
            self._nullable[name] = self._is_nullable(grammar.rules[name])
            self._free[name] = self._is_free(grammar.rules[name])
        self._symbols: dict[tuple[Expression, bool], _Symbol] = {}
        # By identity, with the object so that its id is not reused: hashing walks whole trees.
        self._by_id: dict[tuple[int, bool], tuple[Expression, _Symbol]] = {}
        self._meetings: dict[tuple[_Symbol, _Symbol], _Meeting] = {}

    def symbol(self, expression: Expression, is_inner: bool) -> _Symbol:
        """What is known of it, in a document or elsewhere."""
        known = self._by_id.get((id(expression), is_inner))
        if known is None:
            symbol = self._symbols.get((expression, is_inner))
            if symbol is None:
                is_terminal = expression not in self._given and self._is_bounded(expression)
                symbol = _Symbol(expression, is_terminal, is_inner=is_inner)
                symbol.is_nullable = is_terminal and self._is_nullable(expression)
                self._symbols[expression, is_inner] = symbol
            known = self._by_id[id(expression), is_inner] = (expression, symbol)
        return known[1]

    def is_document(self, rule: str) -> bool:
        """Whether it is one of a document's rules."""
        return rule in self._documents

    def pieces(self, symbol: _Symbol) -> tuple[Expression, ...]:
        """What a text or sequence is cut into: as given; where recursion begins and ends; where a
        word, blanks or signs of a text end; otherwise in the middle."""
        if not symbol.pieces:
            symbol.pieces = self._given.get(symbol.expression) or self._cut(symbol.expression)
        return symbol.pieces

    def _cut(self, expression: Expression) -> tuple[Expression, ...]:
        if isinstance(expression, Literal):
            text = expression.text
            run = _RUN.match(text)
            assert run is not None and len(text) > 1, expression
            middle = run.end() if run.end() < len(text) else len(text) // 2
            return Literal(text[:middle]), Literal(text[middle:])
        assert isinstance(expression, Concat), expression
        parts = expression.parts
        if all(map(self._is_bounded, parts)):
            middle = (len(parts) + 1) // 2
            while middle > 1 and self._is_free(parts[middle - 1]):
                middle -= 1  # it ends with what is behind it
            return _sequence(parts[:middle]), _sequence(parts[middle:])
        found: list[Expression] = []
        for is_bounded, some in groupby(parts, self._is_bounded):
            together = tuple(some)
            found += [_sequence(together)] if is_bounded else together
        return tuple(found)

    def some_text(self, symbol: _Symbol) -> Expression:
        """A terminal without the empty text."""
        terminal = symbol.expression
        if not symbol.is_nullable:
            return terminal
        if isinstance(terminal, Repeat) and not self._is_nullable(terminal.part):
            return repeat(terminal.part, 1, terminal.most)
        return And((terminal, _SOME_TEXT))

    def keep_apart(self) -> None:
        """Cut until no terminal swallows what follows another. Raises InvalidGrammar."""
        while found := {other for _, other in self.swallowing()}:
            for symbol in found:
                if isinstance(symbol.expression, And | Not):
                    raise InvalidGrammar(
                        "where free text ends cannot be told from what may follow it: let it end "
                        "with a text of its own"
                    )
                symbol.is_terminal = False

    def _is_nullable(self, expression: Expression) -> bool:
        match expression:
            case Literal(text):
                return not text
            case Chars():
                return False
            case Ref(name):
                return self._nullable[name]
            case Repeat(part, least):
                return least == 0 or self._is_nullable(part)
            case Not(part):
                return not self._is_nullable(part)
            case Alt(parts):
                return any(map(self._is_nullable, parts))
            case Concat(parts) | And(parts):
                return all(map(self._is_nullable, parts))

    def _is_free(self, expression: Expression) -> bool:
        """Whether it has parts that can be cut nowhere."""
        match expression:
            case Ref(name):
                return self._free[name]
            case Repeat(part):
                return self._is_free(part)
            case Concat(parts) | Alt(parts):
                return any(map(self._is_free, parts))
            case _:
                return isinstance(expression, And | Not)

    def _is_bounded(self, expression: Expression) -> bool:
        return self._size(expression) <= MAX_TERMINAL_PARTS

    def _size(self, expression: Expression) -> int:
        """Parts, those of rules included; more than MAX_TERMINAL_PARTS for a recursive one."""
        match expression:
            case Ref(name):
                is_cut = expression in self._given  # what it is part of is none, either
                unbounded = MAX_TERMINAL_PARTS + 1
                return unbounded if is_cut else self._sizes.get(name, unbounded)
            case Repeat(part) | Not(part):
                return 1 + self._size(part)
            case Concat(parts) | Alt(parts) | And(parts):
                return 1 + sum(map(self._size, parts))
            case Literal(text):
                return 1 + len(text)
            case _:
                return 1

    # Below: which terminals meet, and where.

    def swallowing(self) -> Iterator[tuple[_Symbol, _Symbol]]:
        """Pairs of a terminal, and one that swallows what follows it; one that is too large to be
        judged with itself, and then the others are judged in the next round."""
        for symbol in self._symbols.values():
            symbol.within.clear()
            symbol.behind.clear()
        first = _neighbours(self._rules, self._start, self)
        try:
            for one, other in self._allowed_together(first):
                next_bytes = self._meeting(one, other).next_bytes
                if next_bytes and any(
                    not next_bytes.isdisjoint(self._automaton(after).first_bytes)
                    for after in one.follow
                ):
                    yield one, other
        except _TooLarge as error:
            (terminal,) = error.args
            yield terminal, terminal

    def _allowed_together(self, first: set[_Symbol]) -> set[tuple[_Symbol, _Symbol]]:
        """Pairs of terminals, in both orders and each with itself; of two within documents only
        those that these may end with, for JSON's tokens swallow none of each other."""
        pairs: set[tuple[_Symbol, _Symbol]] = set()
        waiting: list[tuple[_Symbol, _Symbol]] = []

        def meet(some: Iterable[_Symbol], others: Iterable[_Symbol]) -> None:
            new = {(a, b) for a in some for b in others} - pairs
            waiting.extend(new)
            pairs.update(new)
            pairs.update((b, a) for a, b in new)

        before = [symbol for symbol in self._symbols.values() if symbol.behind]
        meet(first, first)
        for group in {frozenset(symbol.behind) for symbol in before}:
            meet(group, group)
        last = [symbol for symbol in before if symbol.is_inner]
        meet(last, last)
        while waiting:
            one, other = waiting.pop()
            if one is other or not self._meeting(one, other).is_shared:
                continue
            if one.is_inner and other.is_inner:
                meet(one.behind, other.behind)
            else:
                meet(one.follow, other.follow)
        return pairs

    def _meeting(self, one: _Symbol, other: _Symbol) -> _Meeting:
        known = self._meetings.get((one, other))
        if known is None:
            known = _meeting(self._automaton(one), self._automaton(other))
            self._meetings[one, other] = known
        return known

    def _automaton(self, terminal: _Symbol) -> _Automaton:
        if terminal.automaton is None:
            rules = {**self._rules, "": terminal.expression}
            try:
                dfa = build_dfa(Grammar(rules, ""), max_states=MAX_TERMINAL_STATES)
            except TooManyStates:
                raise _TooLarge(terminal) from None
            terminal.automaton = _Automaton(dfa)
        return terminal.automaton


class _TooLarge(Exception):
    """The automaton of a terminal, its argument."""


def _sequence(parts: tuple[Expression, ...]) -> Expression:
    # Texts are not joined: where one ends is where its author lets a word end.
    return parts[0] if len(parts) == 1 else Concat(parts)


def _neighbours(rules: Mapping[str, Expression], start: str, cut: _Cut) -> set[_Symbol]:
    """The terminals that a text may begin with; notes with each those that may follow it."""
    sides: dict[str, _Sides] = {start: _Sides()}

    def of(expression: Expression, is_inner: bool) -> _Sides:
        symbol = cut.symbol(expression, is_inner)
        if symbol.is_terminal:
            some = set() if expression == EMPTY_WORD else {symbol}
            return _Sides(some, some, symbol.is_nullable)
        match expression:
            case Ref(name):
                return sides.setdefault(name, _Sides())
            case Literal() | Concat():
                first, *others = (of(piece, is_inner) for piece in cut.pieces(symbol))
                return functools.reduce(lambda a, b: joined(a, b, is_inner), others, first)
            case Alt(parts):
                found = [of(part, is_inner) for part in parts]
                return _Sides(
                    set().union(*(side.first for side in found)),
                    set().union(*(side.last for side in found)),
                    any(side.is_nullable for side in found),
                )
            case Repeat(part, least, most):
                inner = of(part, is_inner)
                if most is None or most > 1:
                    joined(inner, inner, is_inner)
                return _Sides(inner.first, inner.last, least == 0 or inner.is_nullable)
            case _:
                raise AssertionError(expression)

    def joined(left: _Sides, right: _Sides, is_inner: bool) -> _Sides:
        for terminal in left.last:
            (terminal.within if is_inner else terminal.behind).update(right.first)
        return _Sides(
            left.first | right.first if left.is_nullable else left.first,
            right.last | left.last if right.is_nullable else right.last,
            left.is_nullable and right.is_nullable,
        )

    size = -1
    while size != (size := sum(side.size() for side in sides.values())):
        for name in list(sides):
            found, known = of(rules[name], cut.is_document(name)), sides[name]
            known.first |= found.first
            known.last |= found.last
            known.is_nullable |= found.is_nullable
    return sides[start].first


class _Automaton:
    """A terminal's, with the bytes that may come next in each state, found as they are needed."""

    def __init__(self, dfa: Dfa) -> None:
        self.start = dfa.start
        self.accepting = dfa.accepting.tolist()
        self._dfa = dfa
        self._moves: dict[int, dict[int, int]] = {}

    def moves(self, state: int) -> dict[int, int]:
        """By byte, the states behind it."""
        known = self._moves.get(state)
        if known is None:
            row = self._dfa.transitions[state, self._dfa.class_of]
            alive = np.flatnonzero(row != DEAD)
            known = dict(zip(alive.tolist(), row[alive].tolist(), strict=True))
            self._moves[state] = known
        return known

    @property
    def first_bytes(self) -> Set[int]:
        return self.moves(self.start).keys()


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Two terminals at one place: whether a text is in both, and which bytes behind a text of the
    one go on with the other."""

    is_shared: bool
    next_bytes: Set[int]


def _meeting(a: _Automaton, b: _Automaton) -> _Meeting:
    """By a walk over pairs of states; the empty text, which is no terminal's, is left out."""
    next_bytes: set[int] = set()
    is_shared = False
    seen: set[tuple[int, int]] = set()
    waiting = [(a.start, b.start)]
    while waiting:
        if len(seen) > MAX_PAIRS:
            return _Meeting(True, frozenset(range(256)))
        after_a, after_b = map(_Automaton.moves, (a, b), waiting.pop())
        both = after_a.keys() & after_b.keys()
        for pair in {(after_a[byte], after_b[byte]) for byte in both} - seen:
            seen.add(pair)
            waiting.append(pair)
            if a.accepting[pair[0]]:
                is_shared |= b.accepting[pair[1]]
                next_bytes |= b.moves(pair[1]).keys()
    return _Meeting(is_shared, next_bytes)


class _Writing:
    """Writes the rules of one grammar as they are cut."""

    def __init__(self, writer: LarkWriter, grammar: Grammar, cut: _Cut) -> None:
        self._writer = writer
        self._rules = grammar.rules
        self._cut = cut
        self._terminals = writer.terminals_of(grammar)
        self._names: dict[str, str] = {}
        self._waiting: list[str] = []

    def written(self, name: str) -> str:
        first = self._named(name)
        while self._waiting:
            rule = self._waiting.pop()
            is_inner = self._cut.is_document(rule)
            body = self._body(self._rules[rule], is_inner)
            self._writer.line(self._names[rule], body or '""')
        return first

    def _named(self, name: str) -> str:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = self._writer.new_rule()
            self._waiting.append(name)
        return known

    def _body(self, expression: Expression, is_inner: bool) -> str:
        """The right side of a rule; "" for the empty text."""
        if expression == EMPTY_WORD:
            return ""
        symbol = self._cut.symbol(expression, is_inner)
        if symbol.is_terminal:
            terminal = self._terminals(self._cut.some_text(symbol))
            return f"{terminal}?" if symbol.is_nullable else terminal
        match expression:
            case Ref(name):
                return self._named(name)
            case Literal() | Concat():
                pieces = (self._body(piece, is_inner) for piece in self._cut.pieces(symbol))
                return " ".join(filter(None, pieces))
            case Alt(parts):
                bodies = list(dict.fromkeys(self._body(part, is_inner) for part in parts))
                there = " | ".join(filter(None, bodies))
                return f"({there})?" if "" in bodies else f"({there})"
            case Repeat(part, least, most):
                body = self._body(part, is_inner)
                return f"({body}){{{least},{'' if most is None else most}}}" if body else ""
            case _:
                raise AssertionError(expression)
