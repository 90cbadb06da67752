"""Grammars in llguidance's dialect of Lark: what no automaton holds, written for its parser.

The parser's lexer is greedy and never goes back: had a grammar of JSON the terminals `{` and
`{"a":`, then after `{"` it would wait for an `a`, whatever else might follow the first. So rules of
JSON are cut where JSON's own tokens end (RFC 8259, section 2): structural characters, strings,
numbers and names, runs of space. Each ends where the next begins, whatever the grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

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

STRUCTURAL = "{}[],:"
SPACES = " \t\n\r"
QUOTE, BACKSLASH = '"', "\\"


def json_to_lark(grammar: Grammar) -> str:
    """The rules of a language of JSON texts. Raises InvalidGrammar."""
    writer = LarkWriter()
    writer.line("start", writer.json_rules(grammar))
    return writer.text()


def regular_to_lark(grammar: Grammar) -> str:
    """A grammar without recursion, as one terminal. Raises InvalidGrammar."""
    writer = LarkWriter()
    writer.line("start", _Rules(writer, grammar.rules).terminal(Ref(grammar.start)))
    return writer.text()


class LarkWriter:
    """Lines of a Lark grammar, under names of its own; equal terminals get one name."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}
        self._num_rules = 0

    def line(self, name: str, body: str) -> None:
        """A rule or terminal of that name."""
        self._lines.append(f"{name}: {body}")

    def new_rule(self) -> str:
        """A name not yet taken."""
        self._num_rules += 1
        return f"r{self._num_rules}"

    def terminal(self, body: str) -> str:
        """The name of the terminal with this body."""
        name = self._terminals.get(body)
        if name is None:
            name = self._terminals[body] = f"T{len(self._terminals)}"
            self.line(name, body)
        return name

    def json_rules(self, grammar: Grammar) -> str:
        """Write a grammar of JSON texts; the name of its first rule."""
        return _Rules(self, grammar.rules).rule(Ref(grammar.start))

    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(self._lines) + "\n"


class _Place(Enum):
    """Where in a JSON string token the text so far ends."""

    BEFORE = 0
    INSIDE = 1
    ESCAPE = 2
    BEHIND = 3
    BEYOND = 4  # this is no string token


_Places = frozenset[_Place]
_ONE_STRING: _Places = frozenset({_Place.BEHIND})
_NEXT_PLACE = {  # at a quote, at a backslash, at any other character
    _Place.BEFORE: (_Place.INSIDE, _Place.BEYOND, _Place.BEYOND),
    _Place.INSIDE: (_Place.BEHIND, _Place.ESCAPE, _Place.INSIDE),
    _Place.ESCAPE: (_Place.INSIDE, _Place.INSIDE, _Place.INSIDE),
    _Place.BEHIND: (_Place.BEYOND, _Place.BEYOND, _Place.BEYOND),
    _Place.BEYOND: (_Place.BEYOND, _Place.BEYOND, _Place.BEYOND),
}


class _Kind(Enum):
    """What a character is to JSON outside strings."""

    STRUCTURE = 0
    QUOTE = 1
    SPACE = 2
    WORD = 3  # of numbers, true, false, null


class _Rules:
    """The rules of one grammar on their way to Lark."""

    def __init__(self, writer: LarkWriter, rules: Mapping[str, Expression]) -> None:
        self._writer = writer
        self._rules = rules
        self._names: dict[str, str] = {}
        self._recursive = _recursive_rules(rules)

    def rule(self, expression: Expression) -> str:
        """An expression that begins and ends outside strings, as the right side of a rule."""
        if self._is_token(expression):
            return self.terminal(expression)
        if isinstance(expression, Ref):
            return self._named(expression.name)
        if isinstance(expression, Alt):
            return f"({' | '.join(self.rule(part) for part in expression.parts)})"
        if isinstance(expression, Repeat):
            most = "" if expression.most is None else expression.most
            return f"({self.rule(expression.part)}){{{expression.least},{most}}}"
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
            self._writer.line(known, self.rule(self._resolved(Ref(name))))
        return known

    def _resolved(self, ref: Ref) -> Expression:
        try:
            return self._rules[ref.name]
        except KeyError:
            raise InvalidGrammar(f"there is no rule {ref.name!r}") from None

    # What follows cuts a sequence into JSON's tokens.

    def _tokens(self, expression: Literal | Concat) -> Iterable[str]:
        """Terminals and rules in their order."""
        open_token: list[Expression] = []
        places: _Places = frozenset({_Place.BEFORE})
        for part in _characters(expression):
            if places != {_Place.BEFORE}:
                open_token.append(part)
                places = self._places(part, places)
                if places == _ONE_STRING:
                    yield self.terminal(concat(*open_token))
                    open_token, places = [], frozenset({_Place.BEFORE})
                continue
            kinds = self._kinds(part)
            if open_token and not (len(kinds) == 1 and kinds == self._kinds(open_token[-1])):
                yield self.terminal(concat(*open_token))
                open_token = []
            if kinds in ({_Kind.WORD}, {_Kind.SPACE}):
                open_token.append(part)
            elif part == Literal(QUOTE):
                open_token, places = [part], frozenset({_Place.INSIDE})
            else:
                yield self.rule(part)
        if open_token:
            yield self.terminal(concat(*open_token))

    def _is_token(self, expression: Expression) -> bool:
        """Whether every text is one token of JSON, and none can be a part of a longer sequence."""
        if isinstance(expression, Ref) and expression.name in self._recursive:
            return False
        kinds = self._kinds(expression)
        if _Kind.QUOTE not in kinds:
            is_one_character = isinstance(expression, Literal) and len(expression.text) == 1
            return kinds <= {_Kind.WORD} or kinds <= {_Kind.SPACE} or is_one_character
        return self._places(expression, frozenset({_Place.BEFORE})) == _ONE_STRING

    def _kinds(self, expression: Expression) -> frozenset[_Kind]:
        """Kinds of characters that may stand in the texts; at least these."""
        if isinstance(expression, Literal):
            return frozenset(_kind(character) for character in expression.text)
        if isinstance(expression, Chars):
            return _kinds_of_ranges(expression)
        if isinstance(expression, Repeat):
            return self._kinds(expression.part)
        if isinstance(expression, And):
            return frozenset(_Kind).intersection(*map(self._kinds, expression.parts))
        if isinstance(expression, Concat | Alt):
            return frozenset[_Kind]().union(*map(self._kinds, expression.parts))
        if isinstance(expression, Ref) and expression.name not in self._recursive:
            return self._kinds(self._resolved(expression))
        return frozenset(_Kind)

    def _places(self, expression: Expression, before: _Places) -> _Places:
        """Where the texts may end in a string token; at least there."""
        if isinstance(expression, Literal):
            for character in expression.text:
                before = frozenset(_NEXT_PLACE[place][_column(character)] for place in before)
            return before
        if isinstance(expression, Chars):
            columns = _columns_of_ranges(expression)
            return frozenset(_NEXT_PLACE[place][column] for place in before for column in columns)
        if isinstance(expression, Concat):
            for part in expression.parts:
                before = self._places(part, before)
            return before
        if isinstance(expression, Alt):
            return frozenset[_Place]().union(
                *(self._places(part, before) for part in expression.parts)
            )
        if isinstance(expression, Repeat):
            return self._places_repeated(expression, before)
        if isinstance(expression, And):
            return frozenset(_Place).intersection(
                *(self._places(part, before) for part in expression.parts)
            )
        if isinstance(expression, Ref) and expression.name not in self._recursive:
            return self._places(self._resolved(expression), before)
        return frozenset(_Place)

    def _places_repeated(self, expression: Repeat, before: _Places) -> _Places:
        places = before if expression.least == 0 else self._places(expression.part, before)
        while True:
            more = places | self._places(expression.part, places)
            if more == places:
                return places
            places = more

    # What follows writes terminals.

    def _body(self, expression: Expression) -> str:
        """In Lark's terms where And and Not stand, else as a regex of the Rust crate."""
        if isinstance(expression, Ref) and self._needs_operators(expression):
            return self._body(self._inlined(expression))
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
            return self._needs_operators(self._inlined(expression))
        if isinstance(expression, Repeat):
            return self._needs_operators(expression.part)
        if isinstance(expression, Concat | Alt):
            return any(self._needs_operators(part) for part in expression.parts)
        return False

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


def _kind(character: str) -> _Kind:
    if character in STRUCTURAL:
        return _Kind.STRUCTURE
    if character == QUOTE:
        return _Kind.QUOTE
    return _Kind.SPACE if character in SPACES else _Kind.WORD


def _column(character: str) -> int:
    return 0 if character == QUOTE else 1 if character == BACKSLASH else 2


def _kinds_of_ranges(chars: Chars) -> frozenset[_Kind]:
    special = [c for c in STRUCTURAL + SPACES + QUOTE if _contains(chars, c)]
    size = sum(high - low + 1 for low, high in chars.ranges)
    words = {_Kind.WORD} if size > len(special) else set()
    return frozenset(map(_kind, special)) | words


def _columns_of_ranges(chars: Chars) -> frozenset[int]:
    special = [c for c in QUOTE + BACKSLASH if _contains(chars, c)]
    size = sum(high - low + 1 for low, high in chars.ranges)
    others = {2} if size > len(special) else set()
    return frozenset(map(_column, special)) | others


def _contains(chars: Chars, character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in chars.ranges)


def _recursive_rules(rules: Mapping[str, Expression]) -> frozenset[str]:
    """Names of the rules that reach a rule which reaches itself."""
    direct = {name: frozenset(_references(expression)) for name, expression in rules.items()}
    regular: set[str] = set()
    while True:  # a rule is regular once all that it refers to are
        more = {name for name, refs in direct.items() if name not in regular and refs <= regular}
        if not more:
            return frozenset(direct) - regular
        regular |= more


def _references(expression: Expression) -> Iterable[str]:
    if isinstance(expression, Ref):
        yield expression.name
    elif isinstance(expression, Repeat | Not):
        yield from _references(expression.part)
    elif isinstance(expression, Concat | Alt | And):
        for part in expression.parts:
            yield from _references(part)
