"""Warns of terminals in a caller's Lark grammar that swallow what follows others.

The parser's lexer takes as many bytes as it can: in `start: WORD "end"` with `WORD: /[a-z]+/` the
text `end` is always a part of the word, and no output ever ends. Such a grammar means what it says
to llguidance, so it is not refused or changed; the warning names the terminals. Only the commonest
part of the notation is read, and of a grammar with anything else nothing is said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ..errors import InvalidGrammar
from .grammar import (
    EMPTY_WORD,
    Alt,
    Concat,
    Expression,
    Grammar,
    Literal,
    Ref,
    Repeat,
    alt,
    repeat,
)
from .lexing import swallowing
from .regular.regex_parser import parse_regex

MAX_TERMINALS = 64
MAX_WARNINGS = 8

_TOKEN = re.compile(
    r"""(?P<name>[A-Za-z_]\w*)|(?P<text>"(?:[^"\\\n]|\\.)*"(?!i))"""
    r"|(?P<regex>/(?:[^/\\\n]|\\.)+/(?![a-z]))|(?P<counts>\{\s*\d+\s*(?:,\s*\d*\s*)?\})"
    r"|(?P<mark>[:|()?*+])|(?P<space>[ \t\n\r]+|//[^\n]*)"
)
_MANY = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _NotRead(Exception):
    """Something else than the notation that is read here."""


def swallowing_terminals(source: str) -> tuple[str, ...]:
    """Warnings, at most MAX_WARNINGS; () for what is not read."""
    try:
        reader = _Reader(source)
        grammar = Grammar(reader.rules, "start")
        if "start" not in reader.rules or len(reader.terminals) > MAX_TERMINALS:
            return ()
        pairs = swallowing(grammar, reader.cuts)
    except (_NotRead, InvalidGrammar):
        return ()
    found = dict.fromkeys((_shown(one), _shown(other)) for one, other in pairs)
    return tuple(
        f"terminal {other} may swallow what follows {one}: the lexer takes as much as it can"
        if one != other
        else f"terminal {one} may swallow what follows it: the lexer takes as much as it can"
        for one, other in sorted(found)[:MAX_WARNINGS]
    )


def _shown(terminal: Expression) -> str:
    assert isinstance(terminal, Ref), terminal
    return terminal.name


class _Reader:
    """The rules by name, terminals among them; `cuts`: all that is no terminal."""

    def __init__(self, source: str) -> None:
        self.rules: dict[str, Expression] = {}
        self.terminals: set[str] = set()
        self.cuts: dict[Expression, tuple[Expression, ...]] = {}
        self._tokens = list(_tokens(source))
        self._at = 0
        while self._at < len(self._tokens):
            self._statement()
        for name in self.terminals:
            if name not in self.rules:
                raise _NotRead
        for name, rule in self.rules.items():
            if name not in self.terminals:
                self._note(rule)

    def _statement(self) -> None:
        kind, name = self._next()
        if kind != "name" or self._next() != ("mark", ":") or name in self.rules:
            raise _NotRead
        is_terminal = name.isupper()
        if is_terminal:
            self.terminals.add(name)
        self.rules[name] = self._choices(is_terminal)

    def _choices(self, is_terminal: bool) -> Expression:
        choices = [self._sequence(is_terminal)]
        while self._takes("|"):
            choices.append(self._sequence(is_terminal))
        return alt(*choices)

    def _sequence(self, is_terminal: bool) -> Expression:
        parts: list[Expression] = []
        while not self._is_end():
            parts.append(self._item(is_terminal))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts)) if parts else EMPTY_WORD

    def _is_end(self) -> bool:
        rest = self._tokens[self._at : self._at + 2]
        if not rest or rest[0] in (("mark", "|"), ("mark", ")")):
            return True
        return rest[0][0] == "name" and rest[-1] == ("mark", ":")

    def _item(self, is_terminal: bool) -> Expression:
        kind, text = self._next()
        if (kind, text) == ("mark", "("):
            item = self._choices(is_terminal)
            if self._next() != ("mark", ")"):
                raise _NotRead
        elif kind == "name":
            if text.isupper():
                self.terminals.add(text)
            item = Ref(text)
        elif kind in ("text", "regex"):
            item = self._own(kind, text) if is_terminal else self._anonymous(kind, text)
        else:
            raise _NotRead
        return self._repeated(item)

    def _repeated(self, item: Expression) -> Expression:
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            if kind == "mark" and text in _MANY:
                item = repeat(item, *_MANY[text])
            elif kind == "counts":
                least, _, last = text[1:-1].partition(",")
                bound = int(last) if last.strip() else None
                item = repeat(item, int(least), bound if "," in text else int(least))
            else:
                break
            self._at += 1
        return item

    def _anonymous(self, kind: str, text: str) -> Expression:
        self.terminals.add(text)
        if text not in self.rules:
            self.rules[text] = self._own(kind, text)
        return Ref(text)

    def _own(self, kind: str, text: str) -> Expression:
        if kind == "regex":
            return parse_regex(text[1:-1].replace("\\/", "/"), dialect="python", anchored=True)
        try:
            return Literal(json.loads(text))
        except ValueError:
            raise _NotRead from None

    def _note(self, expression: Expression) -> None:
        match expression:
            case Ref(name) if name in self.terminals:
                return
            case Ref(name):
                if name not in self.rules:
                    raise _NotRead
                self.cuts[expression] = ()
            case Concat(parts):
                self.cuts[expression] = parts
                for part in parts:
                    self._note(part)
            case Alt(parts):
                self.cuts[expression] = ()
                for part in parts:
                    self._note(part)
            case Repeat(part):
                self.cuts[expression] = ()
                self._note(part)

    def _next(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise _NotRead
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, mark: str) -> bool:
        is_there = self._tokens[self._at : self._at + 1] == [("mark", mark)]
        self._at += is_there
        return is_there


def _tokens(source: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(source):
        found = _TOKEN.match(source, at)
        if found is None:
            raise _NotRead
        at = found.end()
        kind = next(name for name in _KINDS if found[name] is not None)
        if kind != "space":
            yield kind, found[0]


_KINDS = ("name", "text", "regex", "counts", "mark", "space")
