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

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

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
MAX_TERMINAL_STATES = 2_000
MAX_PAIRS = 20_000  # of states in a walk; past them two terminals count as swallowing

_RUN = re.compile(r"\w+|\s+|[^\w\s]+")
_SOME_TEXT = Repeat(Chars(ALL), 1, None)


def rules_to_lark(grammar: Grammar) -> str:
    """The Lark text of exactly the grammar's language. Raises InvalidGrammar."""
    writer = LarkWriter()
    writer.line("start", write_rules(writer, grammar))
    return writer.text()


def write_rules(writer: LarkWriter, grammar: Grammar) -> str:
    """Write a grammar's rules; returns the name of the first. Raises InvalidGrammar."""
    cut = _Cut(grammar)
    cut.keep_apart()
    return _Writing(writer, grammar, cut).written(grammar.start)


@dataclass(slots=True)
class _Sides:
    """Which terminals an expression may begin and end with, and whether it may be empty."""

    first: set[Expression] = field(default_factory=set)
    last: set[Expression] = field(default_factory=set)
    is_nullable: bool = False

    def size(self) -> int:
        return 1 + len(self.first) + len(self.last) + self.is_nullable


class _Cut:
    """Where the rules of a grammar are cut into terminals.

    Invariant: `is_terminal` holds for expressions that lead to no recursive rule alone, and for no
    longer than they swallow nothing.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._rules = grammar.rules
        self._start = grammar.start
        self._sizes: dict[str, int] = {}
        self._nullable: dict[str, bool] = {}
        for name in from_below(grammar.rules):
            self._sizes[name] = self._size(grammar.rules[name])
            self._nullable[name] = self.is_nullable(grammar.rules[name])
        self._split: set[Expression] = set()
        self._automata: dict[Expression, _Automaton | None] = {}
        self._meetings: dict[tuple[Expression, Expression], _Meeting] = {}

    def is_terminal(self, expression: Expression) -> bool:
        """Whether it is one terminal, or with the empty text beside it."""
        return expression not in self._split and self._size(expression) <= MAX_TERMINAL_PARTS

    def is_nullable(self, expression: Expression) -> bool:
        """Whether a terminal may be empty."""
        match expression:
            case Literal(text):
                return not text
            case Chars():
                return False
            case Ref(name):
                return self._nullable[name]
            case Repeat(part, least):
                return least == 0 or self.is_nullable(part)
            case Not(part):
                return not self.is_nullable(part)
            case Alt(parts):
                return any(map(self.is_nullable, parts))
            case Concat(parts) | And(parts):
                return all(map(self.is_nullable, parts))

    def some_text(self, terminal: Expression) -> Expression:
        """The terminal without the empty text."""
        if not self.is_nullable(terminal):
            return terminal
        if isinstance(terminal, Repeat) and not self.is_nullable(terminal.part):
            return repeat(terminal.part, 1, terminal.most)
        return And((terminal, _SOME_TEXT))

    def keep_apart(self) -> None:
        """Cut until no terminal swallows what follows another. Raises InvalidGrammar."""
        while swallowing := set(self._swallowing()):
            for terminal in swallowing:
                if isinstance(terminal, And | Not):
                    raise InvalidGrammar(
                        "where free text ends cannot be told from what may follow it: let it end "
                        "with a text of its own"
                    )
            self._split |= swallowing

    def _size(self, expression: Expression) -> int:
        """Parts, those of rules included; more than MAX_TERMINAL_PARTS for a recursive one."""
        match expression:
            case Ref(name):
                return self._sizes.get(name, MAX_TERMINAL_PARTS + 1)
            case Repeat(part) | Not(part):
                return 1 + self._size(part)
            case Concat(parts) | Alt(parts) | And(parts):
                return 1 + sum(map(self._size, parts))
            case Literal(text):
                return 1 + len(text)
            case _:
                return 1

    # Below: which terminals meet, and where.

    def _swallowing(self) -> Iterator[Expression]:
        first, follow = _neighbours(self._rules, self._start, self.is_terminal, self.is_nullable)
        for terminal in {*first, *follow, *(t for after in follow.values() for t in after)}:
            if self._automaton(terminal) is None:
                yield terminal
                return  # others are judged in the next round
        for one, other in self._allowed_together(first, follow):
            next_bytes = np.zeros(256, np.bool_)
            for after in follow.get(one, ()):
                next_bytes |= self._automaton_of(after).first_bytes
            if (self._meeting(one, other).next_bytes & next_bytes).any():
                yield other

    def _allowed_together(
        self, first: set[Expression], follow: Mapping[Expression, set[Expression]]
    ) -> set[tuple[Expression, Expression]]:
        """Pairs of terminals, in both orders and each with itself."""
        pairs: set[tuple[Expression, Expression]] = set()
        waiting: list[tuple[Expression, Expression]] = []

        def meet(some: Iterable[Expression], others: Iterable[Expression]) -> None:
            for pair in ((a, b) for a in some for b in others):
                if pair not in pairs:
                    pairs.update((pair, pair[::-1]))
                    waiting.append(pair)

        meet(first, first)
        for behind in follow.values():
            meet(behind, behind)
        while waiting:
            one, other = waiting.pop()
            if one != other and self._meeting(one, other).is_shared:
                meet(follow.get(one, ()), follow.get(other, ()))
        return pairs

    def _meeting(self, one: Expression, other: Expression) -> _Meeting:
        known = self._meetings.get((one, other))
        if known is None:
            known = _meeting(self._automaton_of(one), self._automaton_of(other))
            self._meetings[one, other] = known
        return known

    def _automaton_of(self, terminal: Expression) -> _Automaton:
        found = self._automaton(terminal)
        assert found is not None, terminal
        return found

    def _automaton(self, terminal: Expression) -> _Automaton | None:
        """None where it is too large to be judged."""
        if terminal not in self._automata:
            try:
                rules = {**self._rules, "": terminal}
                dfa = build_dfa(Grammar(rules, ""), max_states=MAX_TERMINAL_STATES)
            except TooManyStates:
                self._automata[terminal] = None
            else:
                self._automata[terminal] = _Automaton.of(dfa)
        return self._automata[terminal]


def pieces(expression: Expression) -> tuple[Expression, Expression]:
    """What a text or sequence is cut into: where a word, blanks or signs of a text end, otherwise
    in the middle."""
    if isinstance(expression, Literal):
        text = expression.text
        run = _RUN.match(text)
        assert run is not None and len(text) > 1, expression
        middle = run.end() if run.end() < len(text) else len(text) // 2
        return Literal(text[:middle]), Literal(text[middle:])
    assert isinstance(expression, Concat), expression
    middle = (len(expression.parts) + 1) // 2
    return _sequence(expression.parts[:middle]), _sequence(expression.parts[middle:])


def _sequence(parts: tuple[Expression, ...]) -> Expression:
    # Texts are not joined: where one ends is where its author lets a word end.
    return parts[0] if len(parts) == 1 else Concat(parts)


def _neighbours(
    rules: Mapping[str, Expression],
    start: str,
    is_terminal: Callable[[Expression], bool],
    is_nullable: Callable[[Expression], bool],
) -> tuple[set[Expression], dict[Expression, set[Expression]]]:
    """The terminals that a text may begin with, and those that may follow each."""
    sides: dict[str, _Sides] = {start: _Sides()}
    follow: dict[Expression, set[Expression]] = {}

    def of(expression: Expression) -> _Sides:
        if is_terminal(expression):
            some = set() if expression == EMPTY_WORD else {expression}
            return _Sides(some, some, is_nullable(expression))
        match expression:
            case Ref(name):
                return sides.setdefault(name, _Sides())
            case Literal() | Concat():
                left, right = map(of, pieces(expression))
                return joined(left, right)
            case Alt(parts):
                found = [of(part) for part in parts]
                return _Sides(
                    set().union(*(side.first for side in found)),
                    set().union(*(side.last for side in found)),
                    any(side.is_nullable for side in found),
                )
            case Repeat(part, least, most):
                inner = of(part)
                if most is None or most > 1:
                    joined(inner, inner)
                return _Sides(inner.first, inner.last, least == 0 or inner.is_nullable)
            case _:
                raise AssertionError(expression)

    def joined(left: _Sides, right: _Sides) -> _Sides:
        for terminal in left.last:
            follow.setdefault(terminal, set()).update(right.first)
        return _Sides(
            left.first | right.first if left.is_nullable else left.first,
            right.last | left.last if right.is_nullable else right.last,
            left.is_nullable and right.is_nullable,
        )

    size = -1
    while size != (size := sum(side.size() for side in sides.values())):
        for name in list(sides):
            found, known = of(rules[name]), sides[name]
            known.first |= found.first
            known.last |= found.last
            known.is_nullable |= found.is_nullable
    return sides[start].first, follow


@dataclass(frozen=True, slots=True, eq=False)
class _Automaton:
    """A terminal's, with the bytes that its texts begin with."""

    dfa: Dfa
    first_bytes: np.ndarray  # bool [256]

    @classmethod
    def of(cls, dfa: Dfa) -> _Automaton:
        return cls(dfa, dfa.transitions[dfa.start, dfa.class_of] != DEAD)


@dataclass(frozen=True, slots=True, eq=False)
class _Meeting:
    """Two terminals at one place: whether a text is in both, and which bytes behind a text of the
    one go on with the other."""

    is_shared: bool
    next_bytes: np.ndarray  # bool [256]


def _meeting(one: _Automaton, other: _Automaton) -> _Meeting:
    """By a walk over pairs of states; the empty text, which is no terminal's, is left out."""
    next_bytes = np.zeros(256, np.bool_)
    if not (one.first_bytes & other.first_bytes).any():
        return _Meeting(False, next_bytes)
    a, b = one.dfa, other.dfa
    classes = sorted(set(zip(a.class_of.tolist(), b.class_of.tolist(), strict=True)))
    of_a, of_b = (np.array(side) for side in zip(*classes, strict=True))
    seen, waiting, is_shared = {(a.start, b.start)}, [(a.start, b.start)], False
    is_first = True
    while waiting:
        if len(seen) > MAX_PAIRS:
            return _Meeting(True, np.ones(256, np.bool_))
        state, beside = waiting.pop()
        if not is_first and a.accepting[state]:
            is_shared |= bool(b.accepting[beside])
            next_bytes |= b.transitions[beside, b.class_of] != DEAD
        is_first = False
        after_a, after_b = a.transitions[state, of_a], b.transitions[beside, of_b]
        both = (after_a != DEAD) & (after_b != DEAD)
        for pair in set(zip(after_a[both].tolist(), after_b[both].tolist(), strict=True)):
            if pair == (a.start, b.start) and a.accepting[a.start]:  # the start met again
                is_shared |= bool(b.accepting[b.start])
                next_bytes |= b.transitions[b.start, b.class_of] != DEAD
            if pair not in seen:
                seen.add(pair)
                waiting.append(pair)
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
            self._writer.line(self._names[rule], self._body(self._rules[rule]) or '""')
        return first

    def _named(self, name: str) -> str:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = self._writer.new_rule()
            self._waiting.append(name)
        return known

    def _body(self, expression: Expression) -> str:
        """The right side of a rule; "" for the empty text."""
        if expression == EMPTY_WORD:
            return ""
        if self._cut.is_terminal(expression):
            terminal = self._terminals(self._cut.some_text(expression))
            return f"{terminal}?" if self._cut.is_nullable(expression) else terminal
        match expression:
            case Ref(name):
                return self._named(name)
            case Literal() | Concat():
                return " ".join(filter(None, map(self._body, pieces(expression))))
            case Alt(parts):
                bodies = list(dict.fromkeys(map(self._body, parts)))
                there = " | ".join(filter(None, bodies))
                return f"({there})?" if "" in bodies else f"({there})"
            case Repeat(part, least, most):
                body = self._body(part)
                return f"({body}){{{least},{'' if most is None else most}}}" if body else ""
            case _:
                raise AssertionError(expression)
