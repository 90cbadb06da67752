"""Parses regex texts to expressions, in dialects.

"ecma": ECMA-262 with the u flag, as JSON Schema recommends for `pattern`; common and clear syntax
that this flag forbids (`\\-`, a lone `{`, `[\\w-.]`) is read as without the flag.
"python": `re`. "extended": that, and what is also written for other engines of masks, which take
Rust's syntax: `\\p{..}` and `(?<name>..)`. Groups capture nothing here, and lazy quantifiers match
the same texts as greedy ones. Anything not regular is refused by name, and so is what
`resolution.py` cannot resolve.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal as OneOf
from typing import TypeAlias

from ...errors import InvalidGrammar
from ..grammar import Chars, Expression, Literal, repeat
from . import charsets, unicode_classes
from .assertions import (
    ASSERTIONS,
    Behind,
    Boundary,
    End,
    Look,
    Loop,
    Node,
    Start,
    choice,
    sequence,
)
from .charsets import Ranges
from .letter_case import ignoring_case
from .resolution import Unresolvable, resolve

Dialect: TypeAlias = OneOf["ecma", "python", "extended"]
MAX_PATTERN_LENGTH = 50_000
MAX_GROUP_DEPTH = 50
MAX_COUNT = 2**31 - 1

_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
_COUNTS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_PYTHON_COUNTS = re.compile(r"\{([0-9]*)(?:(,)([0-9]*))?\}")
_FLAGS = re.compile(r"\(\?([aiLmsux]*)(?:-([imsx]+))?([:)])")
_NAME = re.compile(r"[^\W\d]\w*>")
_BACKREFERENCE = (
    "backreferences are not supported: they are not regular; remedy: alternatives in place of the "
    "group and what refers to it"
)
_IS_HIGH, _IS_LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


def parse_regex(pattern: str, *, dialect: Dialect = "ecma", anchored: bool) -> Expression:
    """The texts that the regex matches: as a whole, or, unanchored, anywhere within.

    Raises InvalidGrammar with the position of what is malformed or not supported.
    """
    return _parse(pattern, dialect, anchored)


@functools.lru_cache(maxsize=1024)
def _parse(pattern: str, dialect: Dialect, anchored: bool) -> Expression:
    parser = _Parser(pattern, dialect)
    try:
        return resolve(parser.parse(), anchored=anchored)
    except Unresolvable as error:
        raise parser.error(error.reason, error.position) from None


@dataclass(frozen=True, slots=True)
class _Flags:
    ignores_case: bool = False
    dot_is_all: bool = False
    is_ascii: bool = False
    is_by_line: bool = False


@dataclass(slots=True)
class _Group:
    """An open group: its content so far, and its kind."""

    position: int
    flags: _Flags  # that apply after it
    kind: type[Look] | type[Behind] | None = None
    is_negative: bool = False
    choices: list[Node] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    can_repeat: bool = False  # whether a quantifier may follow the last item

    def add(self, node: Node, can_repeat: bool = True) -> None:
        self.items.append(node)
        self.can_repeat = can_repeat

    def next_choice(self) -> None:
        self.choices.append(sequence(self.items))
        self.items, self.can_repeat = [], False

    def close(self) -> Node:
        self.next_choice()
        node = choice(self.choices)
        return node if self.kind is None else self.kind(node, self.is_negative, self.position)


class _Parser:
    """Reads from left to right with a stack of open groups; no recursion."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self.pattern = pattern
        self.is_python = dialect != "ecma"
        self.is_extended = dialect != "python"  # by what is not Python's
        self.position = 0
        self.flags = _Flags()
        self.groups = [_Group(0, self.flags)]

    def parse(self) -> Node:
        self._check_text()
        while self.position < len(self.pattern):
            self._item()
        if len(self.groups) > 1:
            raise self.error("this group is not closed", self.groups[-1].position)
        return self.groups[0].close()

    def error(self, reason: str, position: int) -> InvalidGrammar:
        shown = self.pattern if len(self.pattern) <= 100 else self.pattern[:100] + "..."
        return InvalidGrammar(f"regex {shown!r}, position {position}: {reason}", "regex")

    def _check_text(self) -> None:
        if len(self.pattern) > MAX_PATTERN_LENGTH:
            raise self.error(f"longer than {MAX_PATTERN_LENGTH} characters", MAX_PATTERN_LENGTH)
        for position, character in enumerate(self.pattern):
            if ord(character) in _IS_HIGH or ord(character) in _IS_LOW:
                raise self.error("a lone surrogate is no character", position)

    # -- items

    def _item(self) -> None:
        position, group = self.position, self.groups[-1]
        character = self._next()
        if character == "(":
            self._open(position)
        elif character == ")":
            self._close(position)
        elif character == "|":
            group.next_choice()
        elif character == "[":
            group.add(self._set(self._class(position)))
        elif character == ".":
            group.add(Chars(self._dot()))
        elif character == "^":
            group.add(Start(self._newlines()), can_repeat=False)
        elif character == "$":
            group.add(End(self.is_python, self._newlines()), can_repeat=False)
        elif character == "\\":
            self._escape(position)
        elif character in "*+?{":
            self._quantifier(position)
        else:
            group.add(self._character(ord(character)))

    def _character(self, code: int) -> Expression:
        if self.flags.ignores_case:
            return self._set(((code, code),))
        return Literal(chr(code))

    def _set(self, ranges: Ranges) -> Expression:
        return Chars(ignoring_case(ranges) if self.flags.ignores_case else ranges)

    def _dot(self) -> Ranges:
        if self.flags.dot_is_all:
            return charsets.ALL
        return charsets.complement(self._line_ends())

    def _line_ends(self) -> Ranges:
        return charsets.of_text("\n") if self.is_python else unicode_classes.LINE_TERMINATORS

    def _newlines(self) -> Ranges:
        """What ends lines for `^` and `$`, under the flag m."""
        return self._line_ends() if self.flags.is_by_line else ()

    # -- quantifiers

    def _quantifier(self, position: int) -> None:
        group = self.groups[-1]
        counts = self._counts(position)
        if counts is None:
            group.add(self._character(ord("{")))
            return
        if not group.can_repeat:
            raise self.error("there is nothing to repeat", position)
        if not self._skip("?") and self.is_python and self._skip("+"):
            raise self.error(
                "possessive quantifiers are not supported; remedy: a plain one", position
            )
        part = group.items[-1]
        if isinstance(part, ASSERTIONS):
            group.items[-1] = Loop(part, *counts, position)
        else:
            group.items[-1] = repeat(part, *counts)
        group.can_repeat = False

    def _counts(self, position: int) -> tuple[int, int | None] | None:
        """Least and most; None where a brace is a literal."""
        character = self.pattern[position]
        if character != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        found = (_PYTHON_COUNTS if self.is_python else _COUNTS).match(self.pattern, position)
        if found is None or found.group(0) == "{}":
            return None
        self.position = found.end()
        least = self._count(found.group(1) or "0", position)
        if found.group(2) is None:
            return least, least
        most = self._count(found.group(3), position) if found.group(3) else None
        if most is not None and most < least:
            raise self.error(f"at least {least} and at most {most} times", position)
        return least, most

    def _count(self, digits: str, position: int) -> int:
        if len(digits) > 10 or int(digits) > MAX_COUNT:
            raise self.error(f"a count above {MAX_COUNT}", position)
        return int(digits)

    # -- groups

    def _open(self, position: int) -> None:
        if len(self.groups) > MAX_GROUP_DEPTH:
            raise self.error(f"groups are nested deeper than {MAX_GROUP_DEPTH}", position)
        group = _Group(position, self.flags)
        if self._skip("?"):
            if self._opens_nothing(position):
                return
            self._open_special(group)
        self.groups.append(group)

    def _opens_nothing(self, position: int) -> bool:
        """A comment, or flags for the rest, at the pattern's start only."""
        if self.is_python and self._skip("#"):
            end = self.pattern.find(")", self.position)
            if end < 0:
                raise self.error("this comment is not closed", position)
            self.position = end + 1
            return True
        flags = _FLAGS.match(self.pattern, position)
        if flags is None:
            return False
        self.position = flags.end()
        if flags.group(3) == ":":
            self.position = position + 2
            return False
        if position != 0 or flags.group(2) or not flags.group(1):
            raise self.error("flags for the rest may stand at the pattern's start only", position)
        self.flags = self._changed(flags.group(1), "", position)
        return True

    def _open_special(self, group: _Group) -> None:
        position = group.position
        flags = _FLAGS.match(self.pattern, position)
        if flags is not None:
            self.position = flags.end()
            self.flags = self._changed(flags.group(1), flags.group(2) or "", position)
        elif self._skip("=") or self._skip("!"):
            group.kind, group.is_negative = Look, self.pattern[self.position - 1] == "!"
        elif self._skip("<=") or self._skip("<!"):
            group.kind, group.is_negative = Behind, self.pattern[self.position - 1] == "!"
        elif self.is_python and self._skip("P="):
            raise self.error(_BACKREFERENCE, position)
        elif (self.is_python and self._skip("P<")) or (self.is_extended and self._skip("<")):
            name = _NAME.match(self.pattern, self.position)
            if name is None:
                raise self.error("a group's name is expected", self.position)
            self.position = name.end()
        elif self._skip("("):
            raise self.error("conditional groups are not supported; remedy: alternatives", position)
        elif self._skip(">"):
            raise self.error("atomic groups are not supported; remedy: a plain group", position)
        else:
            raise self.error("unknown kind of group", position)

    def _changed(self, on: str, off: str, position: int) -> _Flags:
        for flag in on + off:
            if flag not in ("isamu" if self.is_python else "ims"):
                reason = f"the flag {flag} is not supported; remedy: a pattern without it"
                raise self.error(reason, position)
        old = self.flags
        return _Flags(
            ignores_case=(old.ignores_case or "i" in on) and "i" not in off,
            dot_is_all=(old.dot_is_all or "s" in on) and "s" not in off,
            is_ascii=(old.is_ascii or "a" in on) and "u" not in on,
            is_by_line=(old.is_by_line or "m" in on) and "m" not in off,
        )

    def _close(self, position: int) -> None:
        if len(self.groups) == 1:
            raise self.error("no group is open", position)
        group = self.groups.pop()
        self.flags = group.flags
        self.groups[-1].add(group.close(), can_repeat=group.kind is None)

    # -- escapes

    def _escape(self, position: int) -> None:
        group, character = self.groups[-1], self._after_backslash(position)
        if character in "bB":
            word, is_negative = self._named_class("w"), character == "B"
            group.add(Boundary(word, is_negative, self.is_python), can_repeat=False)
            return
        if character == "k" or character in "123456789":
            raise self.error(_BACKREFERENCE, position)
        if self.is_python and character in "AZ":
            group.add(Start() if character == "A" else End(), can_repeat=False)
            return
        ranges = self._class_escape(character, position)
        if ranges is not None:
            group.add(self._set(ranges))
        else:
            group.add(self._character(self._code_escape(character, position)))

    def _class_escape(self, character: str, position: int) -> Ranges | None:
        """The set of \\d, \\w, \\s, \\p{..} or their negations; None for another escape."""
        if character in "dDwWsS":
            ranges = self._named_class(character.lower())
        elif character in "pP" and self.is_extended:
            end = self.pattern.find("}", self.position)
            if not self._skip("{") or end < 0:
                raise self.error("expected \\p{name}", position)
            name = self.pattern[self.position : end]
            self.position = end + 1
            known = unicode_classes.property_set(name)
            if known is None:
                raise self.error(f"unknown or unsupported Unicode property {name!r}", position)
            ranges = known
        else:
            return None
        return charsets.complement(ranges) if character.isupper() else ranges

    def _named_class(self, character: str) -> Ranges:
        if self.is_python and not self.flags.is_ascii:
            of_python: dict[str, Callable[[], Ranges]] = {
                "d": unicode_classes.python_digits,
                "w": unicode_classes.python_word,
                "s": unicode_classes.python_space,
            }
            return of_python[character]()
        space = unicode_classes.ASCII_SPACE if self.is_python else unicode_classes.ECMA_SPACE
        if character == "s":
            return space
        return unicode_classes.ASCII_DIGITS if character == "d" else unicode_classes.ASCII_WORD

    def _code_escape(self, character: str, position: int) -> int:
        """The code point of an escape that stands for one character."""
        if character in _CONTROLS:
            return ord(_CONTROLS[character])
        if self.is_python and character == "a":
            return 0x07
        if character == "0":
            return self._octal(position)
        if character == "x":
            return self._hex(2, position)
        if character == "u":
            return self._unicode(position)
        if character == "U" and self.is_python:
            return self._scalar(self._hex(8, position), position)
        if character == "c" and not self.is_python:
            letter = self._next() if self.position < len(self.pattern) else ""
            if letter not in string.ascii_letters or not letter:
                raise self.error("\\c needs a letter", position)
            return ord(letter) % 32
        if character.isascii() and character.isalnum():
            raise self.error(f"unknown escape \\{character}", position)
        return ord(character)

    def _octal(self, position: int) -> int:
        digits = re.compile("[0-7]{0,2}" if self.is_python else "[0-9]?")
        found = digits.match(self.pattern, self.position)
        text = found.group() if found else ""
        if text and not self.is_python:
            raise self.error("octal escapes are not supported", position)
        self.position += len(text)
        return int(text or "0", 8)

    def _unicode(self, position: int) -> int:
        if not self.is_python and self._skip("{"):
            end = self.pattern.find("}", self.position)
            digits = self.pattern[self.position : end] if end >= 0 else ""
            if not re.fullmatch("0*[0-9a-fA-F]{1,6}", digits):
                raise self.error("expected \\u{hexadecimal}", position)
            self.position = end + 1
            return self._scalar(int(digits, 16), position)
        code = self._hex(4, position)
        if code in _IS_HIGH and not self.is_python and self._skip("\\u"):
            low = self._hex(4, position)
            if low in _IS_LOW:
                return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        return self._scalar(code, position)

    def _scalar(self, code: int, position: int) -> int:
        if code in _IS_HIGH or code in _IS_LOW:
            raise self.error("a lone surrogate is no character", position)
        if code > 0x10FFFF:
            raise self.error("beyond the last code point, 10FFFF", position)
        return code

    def _hex(self, num_digits: int, position: int) -> int:
        digits = self.pattern[self.position : self.position + num_digits]
        if len(digits) < num_digits or set(digits) - set(string.hexdigits):
            raise self.error(f"expected {num_digits} hexadecimal digits", position)
        self.position += num_digits
        return int(digits, 16)

    # -- classes

    def _class(self, position: int) -> Ranges:
        is_negated = self._skip("^")
        found: list[tuple[int, int]] = []
        is_first = True
        while is_first or not self._skip("]"):
            if not self.is_python and is_first and self._skip("]"):
                break
            is_first = False
            found += self._class_part(position)
        ranges = charsets.normalized(found)
        if self.flags.ignores_case and is_negated:
            ranges = ignoring_case(ranges)
        return charsets.complement(ranges) if is_negated else ranges

    def _class_part(self, opened: int) -> Ranges:
        """A character, a range or a class escape."""
        position = self.position
        low = self._class_atom(opened)
        is_range = self.pattern.startswith("-", self.position)
        if not is_range or self.pattern.startswith("-]", self.position):
            return low if isinstance(low, tuple) else ((low, low),)
        self.position += 1
        high = self._class_atom(opened)
        if isinstance(low, tuple) or isinstance(high, tuple):
            if self.is_python:
                raise self.error("a range between classes", position)
            ends = (((end, end),) if isinstance(end, int) else end for end in (low, high))
            return charsets.union(charsets.of_text("-"), *ends)
        if high < low:
            raise self.error("the range is in descending order", position)
        return ((low, high),)

    def _class_atom(self, opened: int) -> int | Ranges:
        if self.position >= len(self.pattern):
            raise self.error("this class is not closed", opened)
        position = self.position
        character = self._next()
        if character != "\\":
            return ord(character)
        character = self._after_backslash(position)
        ranges = self._class_escape(character, position)
        if ranges is not None:
            return ranges
        if character == "b":
            return 0x08
        if self.is_python and character in "1234567":
            self.position -= 1
            digits = re.compile("[0-7]{1,3}").match(self.pattern, self.position)
            assert digits is not None
            self.position = digits.end()
            return int(digits.group(), 8)
        return self._code_escape(character, position)

    # -- text

    def _after_backslash(self, position: int) -> str:
        if self.position >= len(self.pattern):
            raise self.error("nothing follows the backslash", position)
        return self._next()

    def _next(self) -> str:
        self.position += 1
        return self.pattern[self.position - 1]

    def _skip(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.position)
        if found:
            self.position += len(text)
        return found
