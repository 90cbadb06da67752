"""Writes grammars that no automaton holds in llguidance's dialect of Lark, for its parser.

The parser's lexer is greedy and never backtracks: if a JSON grammar had the terminals `{` and
`{"a":`, then after `{"` it would wait for an `a`, whatever else might follow the first. So rules of
JSON are cut where JSON's own tokens end (RFC 8259, section 2): structural characters, strings,
numbers and names, runs of space. Each ends where the next begins, whatever the grammar. Numbers by
their remainders are recursive rules; these become an automaton, then a terminal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

from ..errors import InvalidGrammar
from .grammar import (
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
    concat,
)
from .json_tokens import QUOTE, JsonShapes, Kind, Place, from_below, references, words_by_rules
from .regular.build import build_dfa
from .regular.elimination import TooLarge, rules_of

MAX_NUMBER_RULES = 1000  # rules without recursion for one number: any multiple of up to 18
MAX_RULES_INSTEAD = 100  # for a number that already has rules without recursion, by digits
_MAX_INLINE = 40  # characters of a terminal that is inlined at each use

_BEFORE, _INSIDE, _BEHIND = (
    frozenset({place}) for place in (Place.BEFORE, Place.INSIDE, Place.BEHIND)
)


def json_to_lark(grammar: Grammar) -> str:
    """The Lark text of a grammar of JSON texts. Raises InvalidGrammar."""
    writer = LarkWriter()
    writer.line("start", writer.json_rules(grammar))
    return writer.text()


def regular_to_lark(grammar: Grammar) -> str:
    """A grammar without recursion, as one terminal. Raises InvalidGrammar."""
    writer = LarkWriter()
    writer.line("start", writer.regular(grammar))
    return writer.text()


def with_whole_numbers(grammar: Grammar) -> Grammar:
    """A grammar of JSON texts whose numbers are without recursion. Raises InvalidGrammar."""
    return Grammar(_with_whole_numbers(grammar), grammar.start)


def json_cuts(grammar: Grammar) -> dict[Expression, tuple[Expression, ...]]:
    """The expressions of a grammar of JSON texts that are longer than one of JSON's tokens: into
    which parts a sequence is cut; () for what is taken apart as it is built."""
    return _Rules(LarkWriter(), grammar.rules).cuts(grammar.start)


class LarkWriter:
    """Lines of a Lark grammar, with generated names; equal terminals share one name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._names: set[str] = set()
        self._num_rules = 0

    def line(self, name: str, body: str) -> None:
        """Add a rule or terminal with that name."""
        self._lines.append(f"{name}: {body}")

    def new_rule(self) -> str:
        """An unused name."""
        self._num_rules += 1
        return f"r{self._num_rules}"

    def terminal(self, body: str) -> str:
        """The name of the terminal with this body, which may itself be just a name."""
        name = body if body in self._names else self._terminals.get(body)
        if name is None:
            name = self._terminals[body] = f"T{len(self._terminals)}"
            self._names.add(name)
            self.line(name, body)
        return name

    def json_rules(self, grammar: Grammar) -> str:
        """Write a grammar of JSON texts; returns the name of its first rule."""
        return _Rules(self, _with_whole_numbers(grammar)).written(grammar.start)

    def terminals_of(self, grammar: Grammar) -> Callable[[Expression], str]:
        """Writes an expression that leads to no recursive rule as one terminal; its name."""
        return _Rules(self, grammar.rules).terminal

    def regular(self, grammar: Grammar) -> str:
        """Write a grammar without recursion as one terminal; returns its name."""
        return _Rules(self, grammar.rules).terminal(Ref(grammar.start))

    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"


class _Rules:
    """The rules of one grammar during conversion to Lark."""

    def __init__(self, writer: LarkWriter, rules: Mapping[str, Expression]) -> None:
        self._writer = writer
        self._rules = rules
        self._names: dict[str, str] = {}
        self._recursive = frozenset(rules) - frozenset(from_below(rules))
        self._waiting: list[str] = []
        self._shared: dict[str, str | None] = {}

    @functools.cached_property
    def _shapes(self) -> JsonShapes:
        """Of grammars of JSON texts."""
        return JsonShapes(self._rules)

    def written(self, name: str) -> str:
        """Write a rule and all that it refers to; returns its name."""
        first = self._named(name)
        while self._waiting:
            waiting = self._waiting.pop()
            self._writer.line(self._names[waiting], self._rule(self._resolved(Ref(waiting))))
        return first

    def _rule(self, expression: Expression) -> str:
        """An expression that begins and ends outside strings, as the right side of a rule."""
        if self._is_token(expression):
            return self.terminal(expression)
        if isinstance(expression, Ref):
            return self._named(expression.name)
        if isinstance(expression, Alt):
            return f"({' | '.join(self._rule(part) for part in expression.parts)})"
        if isinstance(expression, Repeat):
            most = "" if expression.most is None else expression.most
            return f"({self._rule(expression.part)}){{{expression.least},{most}}}"
        if isinstance(expression, Literal | Concat):
            return f"({' '.join(self._tokens(expression))})"
        return self.terminal(expression)

    def terminal(self, expression: Expression) -> str:
        """A regular expression as one terminal."""
        return self._writer.terminal(self._body(expression))

    def _named(self, name: str) -> str:
        known = self._names.get(name)
        if known is None:
            known = self._names[name] = self._writer.new_rule()
            self._waiting.append(name)
        return known

    def _resolved(self, ref: Ref) -> Expression:
        try:
            return self._rules[ref.name]
        except KeyError:
            raise InvalidGrammar(f"there is no rule {ref.name!r}") from None

    # Below: cutting a sequence into JSON's tokens.

    def _tokens(self, expression: Literal | Concat) -> Iterable[str]:
        """Terminals and rules in their order."""
        for part, is_terminal in self._cut(expression):
            yield self.terminal(part) if is_terminal else self._rule(part)

    def _cut(self, expression: Literal | Concat) -> Iterable[tuple[Expression, bool]]:
        """The parts in their order, and whether each is just a terminal."""
        open_token: list[Expression] = []
        places = _BEFORE
        for part in _characters(expression):
            if places != _BEFORE:
                open_token.append(part)
                places = self._shapes.places(part, places)
                if places == _BEHIND:
                    yield concat(*open_token), True
                    open_token, places = [], _BEFORE
                continue
            kinds = self._shapes.kinds(part)
            if open_token and not (len(kinds) == 1 and kinds == self._shapes.kinds(open_token[-1])):
                yield concat(*open_token), True
                open_token = []
            if kinds in ({Kind.WORD}, {Kind.SPACE}):
                open_token.append(part)
            elif part == Literal(QUOTE):
                open_token, places = [part], _INSIDE
            else:
                yield part, False
        if open_token:
            yield concat(*open_token), True

    def cuts(self, start: str) -> dict[Expression, tuple[Expression, ...]]:
        """What is longer than a token, and into which parts it is cut."""
        found: dict[Expression, tuple[Expression, ...]] = {}
        waiting: list[Expression] = [Ref(start)]
        while waiting:
            expression = waiting.pop()
            if expression in found or self._is_token(expression):
                continue
            match expression:
                case Ref():
                    found[expression] = ()
                    waiting.append(self._resolved(expression))
                case Alt(parts):
                    found[expression] = ()
                    waiting += parts
                case Repeat(part):
                    found[expression] = ()
                    waiting.append(part)
                case Literal() | Concat():
                    cut = list(self._cut(expression))
                    if cut != [(expression, True)]:
                        found[expression] = tuple(part for part, _ in cut)
                        waiting += (part for part, is_terminal in cut if not is_terminal)
        return found

    def _is_token(self, expression: Expression) -> bool:
        """Whether every text is one JSON token that cannot be part of a longer sequence."""
        kinds = self._shapes.kinds(expression)
        if Kind.QUOTE not in kinds:
            is_one_character = isinstance(expression, Literal) and len(expression.text) == 1
            return kinds <= {Kind.WORD} or kinds <= {Kind.SPACE} or is_one_character
        return self._shapes.places(expression, _BEFORE) == _BEHIND

    # Below: writing terminals.

    def _body(self, expression: Expression) -> str:
        """In Lark's notation where And and Not occur, else as a regex of the Rust crate."""
        if isinstance(expression, Ref) and self._needs_operators(expression):
            return self._shared_terminal(expression) or self._body(self._inlined(expression))
        if isinstance(expression, Not):
            return f"(~({self._body(expression.part)}) & /(?s:.*)/)"
        if isinstance(expression, And):
            return f"({' & '.join(self._body(part) for part in expression.parts)})"
        if not self._needs_operators(expression):
            return f"/{self._regex(expression) or _NO_CHARACTER}/"
        if isinstance(expression, Repeat):
            most = "" if expression.most is None else expression.most
            return f"({self._body(expression.part)}){{{expression.least},{most}}}"
        assert isinstance(expression, Concat | Alt), expression
        between = " " if isinstance(expression, Concat) else " | "
        return f"({between.join(self._body(part) for part in expression.parts)})"

    def _needs_operators(self, expression: Expression) -> bool:
        if isinstance(expression, And | Not):
            return True
        if isinstance(expression, Ref):
            if self._shared_terminal(expression) is not None:
                return True
            return self._needs_operators(self._inlined(expression))
        if isinstance(expression, Repeat):
            return self._needs_operators(expression.part)
        if isinstance(expression, Concat | Alt):
            return any(self._needs_operators(part) for part in expression.parts)
        return False

    def _shared_terminal(self, ref: Ref) -> str | None:
        """The name of a rule's own terminal, unless it is short."""
        if ref.name not in self._shared:
            body = self._body(self._inlined(ref))
            is_short = len(body) <= _MAX_INLINE
            self._shared[ref.name] = None if is_short else self._writer.terminal(body)
        return self._shared[ref.name]

    def _regex(self, expression: Expression) -> str:
        if isinstance(expression, Literal):
            return regex_of_text(expression.text)
        if isinstance(expression, Chars):
            ranges = "".join(_escaped_range(low, high) for low, high in expression.ranges)
            return f"[{ranges}]" if ranges else _NO_TEXT
        if isinstance(expression, Concat):
            return "".join(map(self._regex, expression.parts))
        if isinstance(expression, Alt):
            return (
                f"(?:{'|'.join(map(self._regex, expression.parts))})"
                if expression.parts
                else _NO_TEXT
            )
        if isinstance(expression, Repeat):
            most = "" if expression.most is None else expression.most
            return f"(?:{self._regex(expression.part)}){{{expression.least},{most}}}"
        assert isinstance(expression, Ref), expression
        return f"(?:{self._regex(self._inlined(expression))})"

    def _inlined(self, ref: Ref) -> Expression:
        if ref.name in self._recursive:
            raise InvalidGrammar(f"rule {ref.name!r} refers to itself where only a regular one may")
        return self._resolved(ref)


def _with_whole_numbers(grammar: Grammar) -> dict[str, Expression]:
    """The rules, with those of numbers rewritten without recursion. Raises InvalidGrammar."""
    rules = grammar.rules
    words = words_by_rules(rules)
    found = {name: rule for name, rule in rules.items() if name not in words}
    used = [name for rule in found.values() for name in references(rule)]
    plain = words.intersection(from_below(rules))
    for name in dict.fromkeys((grammar.start, *used)):
        if name in words:
            found |= _number_rules(rules, name, plain)
    return found


def _number_rules(
    rules: Mapping[str, Expression], name: str, plain: set[str]
) -> dict[str, Expression]:
    """The rules of one number; `plain` are the unchanged rules without recursion."""
    max_rules = MAX_RULES_INSTEAD if name in plain else MAX_NUMBER_RULES
    try:
        return rules_of(build_dfa(Grammar(rules, name)), name, max_rules)
    except TooLarge as error:
        if name in plain:
            return {name: rules[name] for name in plain}
        raise InvalidGrammar(
            "multipleOf cannot be enforced in a schema that is recursive or too large for an "
            f"automaton, where a number is one token of a parser's: {error}"
        ) from error


_NO_CHARACTER = "(?:)"  # two slashes begin a comment
_NO_TEXT = r"[^\x{0}-\x{10FFFF}]"


def regex_of_text(text: str) -> str:
    """A regex that matches just this text."""
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return (
        character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
    )


def _escaped_range(low: int, high: int) -> str:
    return _escaped(chr(low)) if low == high else f"{_escaped(chr(low))}-{_escaped(chr(high))}"


def _characters(expression: Literal | Concat) -> Iterable[Expression]:
    """Parts of a sequence, literals character by character."""
    if isinstance(expression, Literal):
        yield from map(Literal, expression.text)
        return
    for part in expression.parts:
        if isinstance(part, Literal | Concat):
            yield from _characters(part)
        else:
            yield part
