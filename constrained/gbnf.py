r"""Reads GBNF, llama.cpp's notation of grammars, which xgrammar's EBNF extends.

    root  ::= (expr "=" ws num "\n")+      # a comment
    expr  ::= num ([-+*/] num){0,3}
    num   ::= "-"? [0-9]+ ws
    ws    ::= [ \t]*

Rules by name (letters, digits, `-`, `_`); texts and classes of characters with the escapes
`\xHH \uHHHH \UHHHHHHHH \n \r \t \\ \" \] \[ \- \^` and C's others; `.` for any character;
groups; `* + ? {m} {m,} {m,n}`. A rule ends where the next begins (`name ::=`), so it may have any
number of lines, as in xgrammar. Recursion is allowed everywhere, at a rule's beginning too.

A rule that derives no finite text is no part of the language: where it is `root`'s own, the grammar
is refused; elsewhere what leads there is left out, with a warning.

Source: llama.cpp, grammars/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidGrammar
from .grammar import (
    EMPTY_WORD,
    NOTHING,
    SURROGATES,
    Alt,
    Chars,
    Concat,
    Expression,
    Grammar,
    Literal,
    Ref,
    Repeat,
    alt,
    repeat,
)
from .json_tokens import references
from .regular.charsets import ALL, complement, normalized

START = "root"
MAX_DEPTH = 256  # of groups in each other
MAX_REPEATS = 2**31 - 1

_RULE = re.compile(r"[\w-]+[ \t]*::=")
_NAME = re.compile(r"[\w-]+", re.ASCII)
_SPACE = re.compile(r"(?:\s|#[^\r\n]*)*")
_COUNTS = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {
    "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "0": "\0", **{character: character for character in "\\\"'?[]-^/"},
}  # fmt: skip
_MANY = {"*": (0, None), "+": (1, None), "?": (0, 1)}
# Of xgrammar's and llama.cpp's newer notation, what is no grammar of characters.
_OTHERS = {
    "(=": "lookahead assertions are",
    "<": "tokens by name or number are",
    "!": "tokens that must not come are",
}


@dataclass(frozen=True, slots=True)
class ReadGrammar:
    """The rules that `root` leads to, each of which derives a text, and warnings."""

    grammar: Grammar
    warnings: tuple[str, ...] = ()


def is_gbnf(source: str) -> bool:
    """Whether a line begins with a rule of GBNF, which none of Lark's does."""
    return re.search(rf"^[ \t]*{_RULE.pattern}", source, re.MULTILINE) is not None


def read_gbnf(source: str) -> ReadGrammar:
    """The grammar. Raises InvalidGrammar with line and column, both from 1."""
    rules = _Reader(source).rules()
    ending = _ending(rules)
    if START not in ending:
        stuck = _culprit(rules, ending)
        raise InvalidGrammar(
            f"rule {stuck!r} derives no finite text, and {START!r} cannot end without it: give it "
            "an alternative that does not lead back to it"
        )
    kept = {name: _without(rules[name], ending) for name in ending}
    used = _reached(kept)
    lost = [name for name in _reached(rules) if name not in ending]
    warnings = tuple(f"rule {name!r} derives no finite text, and is left out" for name in lost)
    return ReadGrammar(Grammar({name: kept[name] for name in used}, START), warnings)


class _Reader:
    """One pass over the text; `at` is the place of the next character."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._used: dict[str, int] = {}  # names, with where they were first referred to

    def rules(self) -> dict[str, Expression]:
        found: dict[str, Expression] = {}
        self._skip_space()
        while self._at < len(self._source):
            place = self._at
            if not _RULE.match(self._source, place):
                raise self._error("a rule is expected: name ::= ...")
            name = self._name()
            if name in found:
                raise self._error(f"there is a rule {name!r} already", place)
            self._at = self._source.index("::=", self._at) + 3
            self._skip_space()
            found[name] = self._choices(0)
        for name, place in self._used.items():
            if name not in found:
                raise self._error(f"there is no rule {name!r}", place)
        if START not in found:
            raise InvalidGrammar(f"there is no rule {START!r}, with which a grammar of GBNF begins")
        return found

    def _choices(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise self._error(f"groups are nested deeper than {MAX_DEPTH}")
        choices = [self._sequence(depth)]
        while self._takes("|"):
            choices.append(self._sequence(depth))
        return alt(*choices)

    def _sequence(self, depth: int) -> Expression:
        parts: list[Expression] = []
        while not self._is_end(depth):
            parts.append(self._repeated(self._item(depth)))
        # Not joined: where a text ends tells where a parser's terminals may.
        parts = [part for part in parts if part != EMPTY_WORD]
        return parts[0] if len(parts) == 1 else Concat(tuple(parts)) if parts else EMPTY_WORD

    def _is_end(self, depth: int) -> bool:
        """Whether a sequence ends here. Raises for a text that ends within a group, or a group's
        end without a group."""
        if self._at >= len(self._source):
            if depth:
                raise self._error("the grammar ends within a group: ')' is expected")
            return True
        character = self._source[self._at]
        if character == ")" and not depth:
            raise self._error("')' ends no group")
        if character in "|)":
            return True
        is_rule = _RULE.match(self._source, self._at) is not None
        if is_rule and depth:
            raise self._error("a rule begins within a group: ')' is expected")
        return is_rule

    def _item(self, depth: int) -> Expression:
        for mark, what in _OTHERS.items():
            if self._source.startswith(mark, self._at):
                raise self._error(f"{what} not supported")
        if self._takes("("):
            inner = self._choices(depth + 1)
            self._takes(")")  # `_is_end` has seen it
            return inner
        if self._takes('"', and_space=False):
            return self._text()
        if self._takes("[", and_space=False):
            return self._class()
        if self._takes("."):
            return Chars(ALL)
        place = self._at
        if not _NAME.match(self._source, place):
            raise self._error(f"{self._source[place]!r} begins no text, class, group or name")
        name = self._name()
        self._used.setdefault(name, place)
        self._skip_space()
        return Ref(name)

    def _repeated(self, part: Expression) -> Expression:
        while self._at < len(self._source):
            character = self._source[self._at]
            if character in _MANY:
                self._at += 1
                part = repeat(part, *_MANY[character])
            elif character == "{":
                part = self._counted(part)
            else:
                return part
            self._skip_space()
        return part

    def _counted(self, part: Expression) -> Expression:
        found = _COUNTS.match(self._source, self._at)
        if found is None:
            raise self._error("{m}, {m,} or {m,n} is expected")
        least = int(found[1])
        most = least if found[2] is None else int(found[3]) if found[3] else None
        if max(least, most or 0) > MAX_REPEATS or (most is not None and most < least):
            raise self._error(f"{found[0]}: ascending numbers up to {MAX_REPEATS} are expected")
        self._at = found.end()
        return repeat(part, least, most)

    def _text(self) -> Expression:
        begin = self._at - 1
        characters: list[str] = []
        while not self._takes('"'):
            characters.append(self._character('"', "text", begin))
        return Literal("".join(characters))

    def _class(self) -> Expression:
        begin = self._at - 1
        is_negated = self._takes("^", and_space=False)
        ranges: list[tuple[int, int]] = []
        while not self._takes("]"):
            place = self._at
            low = high = self._character("]", "class", begin)
            if self._source[self._at : self._at + 1] == "-" and not self._is_last_of_class():
                self._at += 1
                high = self._character("]", "class", begin)
            if high < low:
                raise self._error(f"{low!r} to {high!r} is no ascending range", place)
            ranges.append((ord(low), ord(high)))
        if not ranges and not is_negated:
            raise self._error("a class without characters matches nothing", begin)
        found = normalized(ranges)
        return Chars(complement(found) if is_negated else found)

    def _is_last_of_class(self) -> bool:
        return self._source[self._at + 1 : self._at + 2] in ("]", "")

    def _character(self, end: str, what: str, begin: int) -> str:
        """One character of a text or class. Raises where these do not end."""
        place = self._at
        if place >= len(self._source):
            raise self._error(f"this {what} does not end: {end!r} is expected", begin)
        character = self._source[place]
        self._at += 1
        if character == "\\":
            character = self._escaped(place)
        if SURROGATES[0] <= ord(character) <= SURROGATES[1]:
            raise self._error(f"{character!r} is half a character", place)
        return character

    def _escaped(self, place: int) -> str:
        kind = self._source[self._at : self._at + 1]
        self._at += 1
        if kind not in _HEX:
            if kind not in _ESCAPES:
                raise self._error(f"there is no escape '\\{kind}'", place)
            return _ESCAPES[kind]
        digits = self._source[self._at : self._at + _HEX[kind]]
        if not re.fullmatch(rf"[0-9A-Fa-f]{{{_HEX[kind]}}}", digits):
            raise self._error(f"{_HEX[kind]} hexadecimal digits follow '\\{kind}'", place)
        self._at += len(digits)
        if int(digits, 16) > ALL[-1][1]:
            raise self._error(f"'\\{kind}{digits}' is no character", place)
        return chr(int(digits, 16))

    def _name(self) -> str:
        found = _NAME.match(self._source, self._at)
        if found is None:
            raise self._error("a name is of letters, digits, '-' and '_'")
        self._at = found.end()
        return found[0]

    def _takes(self, character: str, *, and_space: bool = True) -> bool:
        if not self._source.startswith(character, self._at):
            return False
        self._at += 1
        if and_space:
            self._skip_space()
        return True

    def _skip_space(self) -> None:
        found = _SPACE.match(self._source, self._at)
        assert found is not None
        self._at = found.end()

    def _error(self, message: str, place: int | None = None) -> InvalidGrammar:
        before = self._source[: self._at if place is None else place]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return InvalidGrammar(f"line {line}, column {column}: {message}")


def _ending(rules: Mapping[str, Expression]) -> dict[str, None]:
    """The rules that derive a finite text, by a least fixpoint."""
    users: dict[str, set[str]] = {}
    for name, rule in rules.items():
        for used in references(rule):
            users.setdefault(used, set()).add(name)
    ending: dict[str, None] = {}
    waiting = [*rules][::-1]
    while waiting:
        name = waiting.pop()
        if name not in ending and _can_end(rules[name], ending):
            ending[name] = None
            waiting += users.get(name, ())
    return ending


def _can_end(expression: Expression, ending: Mapping[str, None]) -> bool:
    match expression:
        case Ref(name):
            return name in ending
        case Concat(parts):
            return all(_can_end(part, ending) for part in parts)
        case Alt(parts):
            return any(_can_end(part, ending) for part in parts)
        case Repeat(part, least):
            return least == 0 or _can_end(part, ending)
        case _:
            return True


def _without(expression: Expression, ending: Mapping[str, None]) -> Expression:
    """The expression without what leads to rules that never end."""
    match expression:
        case Ref(name):
            return expression if name in ending else NOTHING
        case Concat(parts):
            kept = tuple(_without(part, ending) for part in parts)
            return NOTHING if NOTHING in kept else Concat(kept)
        case Alt(parts):
            return alt(*(p for part in parts if (p := _without(part, ending)) != NOTHING))
        case Repeat(part, least, most):
            return repeat(_without(part, ending), least, most)
        case _:
            return expression


def _culprit(rules: Mapping[str, Expression], ending: Mapping[str, None]) -> str:
    """A rule that `root` needs and that leads back to itself, or to rules already seen."""
    name, seen = START, set[str]()
    while True:
        seen.add(name)
        deeper = (n for n in references(rules[name]) if n not in ending and n not in seen)
        found = next(deeper, None)
        if found is None:
            return name
        name = found


def _reached(rules: Mapping[str, Expression]) -> dict[str, None]:
    """The rules that `root` leads to, in that order."""
    reached: dict[str, None] = {START: None}
    waiting = [START]
    while waiting:
        for name in references(rules.get(waiting.pop(), EMPTY_WORD)):
            if name not in reached:
                reached[name] = None
                waiting.append(name)
    return reached
