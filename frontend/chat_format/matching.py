"""Pattern matching on partial text: it matches, cannot match, or needs more text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum


class Undecided(Enum):
    """Why there is no match."""

    FAILED = "failed"  # no further text can match
    NEEDS_MORE = "needs more"  # matches so far


FAILED, NEEDS_MORE = Undecided.FAILED, Undecided.NEEDS_MORE

# What is waited for is bounded: it is looked at again with each piece of a stream.
_BLANKS = re.compile(r"[ \t\r\n]{0,1000}")
_STRING = re.compile(r'"(?:[^"\\]|\\.){0,1000}+("?)', re.DOTALL)
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_BRACKET_OR_QUOTE = re.compile(r'[][{}"<]')
_DELIMITER = re.compile(r"[\s,}\]<]")
_VALUE_STARTS = '{["-0123456789tfn'
_PIECE_CHARS = 4096


class Kind(Enum):
    """Parts of a pattern that are not fixed text."""

    STRING = "a JSON string"
    VALUE = "the start of a JSON value, which stays"
    OBJECT = "the start of a JSON object, which stays"


STRING, VALUE, OBJECT = Kind.STRING, Kind.VALUE, Kind.OBJECT
Part = str | Kind


def match_parts(text: str, at: int, parts: Sequence[Part]) -> int | Undecided:
    """End of a match that begins at `at`; whitespace may stand before each part."""
    for part in parts:
        at = after_blanks(text, at)
        end = _match_part(text, at, part)
        if isinstance(end, Undecided):
            return end
        at = end
    return at


def after_blanks(text: str, at: int) -> int:
    """The first place from `at` on that has no whitespace, or the text's end; behind a thousand
    blanks, the next one."""
    found = _BLANKS.match(text, at)
    assert found is not None
    return found.end()


def is_name(text: str) -> bool:
    """Whether this is a function's name."""
    return _NAME.fullmatch(text) is not None


def match_word(text: str, at: int) -> tuple[str, int] | Undecided:
    """A function's name that begins at `at`, once something follows it."""
    found = _NAME.match(text, at)
    if found is None or found.end() == len(text):
        return NEEDS_MORE if found is not None or at == len(text) else FAILED
    return found[0], found.end()


def match_name(text: str, at: int, *, end: str) -> tuple[str, int] | Undecided:
    """A function's name that begins at `at`, followed by the text `end`."""
    found = _NAME.match(text, at)
    if found is None:
        return NEEDS_MORE if at == len(text) else FAILED
    if text.startswith(end, found.end()):
        return found[0], found.end() + len(end)
    return NEEDS_MORE if end.startswith(_beginning(text, found.end(), end)) else FAILED


def match_any(text: str, at: int, marks: tuple[str, ...]) -> int | Undecided:
    """`at`, where one of these marks begins there, which stays."""
    if text.startswith(marks, at):
        return at
    is_open = any(mark.startswith(_beginning(text, at, mark)) for mark in marks)
    return NEEDS_MORE if is_open else FAILED


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces: each step of a reader may look at all that it holds."""
    return (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))


def _match_part(text: str, at: int, part: Part) -> int | Undecided:
    if at == len(text):
        return NEEDS_MORE
    if part is VALUE:
        return at if text[at] in _VALUE_STARTS else FAILED
    if part is OBJECT:
        return at if text[at] == "{" else FAILED
    if part is STRING:
        found = _STRING.match(text, at)
        if found is None:
            return FAILED
        is_cut = text[found.end() : found.end() + 2] in ("", "\\")
        return found.end() if found[1] else (NEEDS_MORE if is_cut else FAILED)
    assert isinstance(part, str)
    if text.startswith(part, at):
        return at + len(part)
    return NEEDS_MORE if part.startswith(_beginning(text, at, part)) else FAILED


def _beginning(text: str, at: int, mark: str) -> str:
    """As much of the text from `at` on as the mark has characters."""
    return text[at : at + len(mark)]


class ValueScanner:
    """Finds the end of a JSON value that comes in pieces. Invalid JSON ends somewhere, too: before
    a "<" outside of strings at the latest, with which the marks of calls begin."""

    def __init__(self) -> None:
        self._brackets = 0
        self._is_string = False
        self._is_escaped = False
        self._is_scalar: bool | None = None

    def end_in(self, text: str) -> int | None:
        """Where the value ends in this next piece, or None if it continues."""
        if self._is_scalar is None and text:
            self._is_scalar = text[0] not in '{["'
        if self._is_scalar:
            found = _DELIMITER.search(text)
            return None if found is None else found.start()
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_QUOTE_OR_ESCAPE if self._is_string else _BRACKET_OR_QUOTE).search(text, at)
            if found is None:
                return None
            at = found.end()
            if found[0] == "<":
                return found.start()
            self._take(found[0])
            if not self._brackets and not self._is_string:
                return at
        return None

    def _take(self, char: str) -> None:
        if char == '"':
            self._is_string = not self._is_string
        elif char == "\\":
            self._is_escaped = True
        else:
            self._brackets += 1 if char in "{[" else -1
