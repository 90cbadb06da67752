"""Arguments written as literals of Python, or of Gemma's own notation, read as a JSON object:

city="Ulm", days=2, tags=['a', None]      up to the closing bracket
city:<|"|>Ulm<|"|>,days:2,tags:[<|"|>a<|"|>,null]

Strings are told as they come, all else token by token. A quote within a string need not be escaped
where what follows it could not follow the string. Values without a name are those of the listed
parameters in their order; sets and tuples are arrays. In Gemma's notation a string may lack its
marks. What is no literal ends the arguments, whose JSON then is no whole object.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .arguments import Taken
from .matching import FAILED, NEEDS_MORE, Undecided, after_blanks, match_any, overlap

MAX_DEPTH = 64
_MAX_TOKEN_CHARS = 1024  # of names, numbers and words
_NAME = re.compile(r"""[^\s:=,(){}\[\]'"<>|]+""")
_BARE_ENDS = re.compile(r"[,\]})<]")
_QUOTED = re.compile(r"""(["'])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
_ENDS = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*", re.ASCII)  # 07, which Python refuses, too
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false",
          "null": "null"}  # fmt: skip
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_SIMPLE = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "a": "\\u0007",
           "v": "\\u000b", "0": "\\u0000", "\\": "\\\\", "'": "'", '"': '\\"',
           "\n": ""}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(slots=True)
class _Open:
    """An object or array that is being read."""

    is_object: bool
    closing: str
    key_end: str
    has_items: bool = False


class LiteralArguments:
    """Reads the arguments of one call: values up to `closing`. `key_end`: behind their names;
    `quote`: a further mark around strings, in which nothing is escaped; `listed`: the names of
    values that have none, in their order."""

    def __init__(
        self, *, closing: str, key_end: str, quote: str = "", listed: Sequence[str] = ()
    ) -> None:
        self._stack = [_Open(is_object=True, closing=closing, key_end=key_end)]
        self._quote = quote
        self._listed, self._num_items = listed, 0  # of the call itself
        self._expected: Literal["item", "value", "more"] = "item"
        self._string: str | None = None  # the mark that ends the string that is being read
        self._said = "{"

    def read(self, text: str, *, is_last: bool) -> Taken:
        at, step = 0, self._step(text, 0, is_last)
        while step is not None:
            at = step
            step = self._step(text, at, is_last) if self._stack else None
        said, self._said = self._said, ""
        return Taken(said, at, not self._stack)

    def _step(self, text: str, at: int, is_last: bool) -> int | None:
        """Reads a token at `at`; returns its end, or None where more is needed."""
        if self._string is not None:
            return self._more_of_string(text, at, self._string, is_last)
        at = after_blanks(text, at)
        if at == len(text):
            return None
        if text[at] == self._stack[-1].closing and self._expected != "value":
            return self._close(at)
        if self._expected == "more":
            if text[at] != ",":
                return self._fail(at)
            self._expected = "item"
            return at + 1
        if self._expected == "item" and self._stack[-1].is_object:
            return self._name(text, at)
        return self._value(text, at, is_last)

    def _close(self, at: int) -> int:
        self._said += "}" if self._stack.pop().is_object else "]"
        self._expected = "more"
        return at + 1

    def _fail(self, at: int) -> int:
        self._stack.clear()
        return at

    def _name(self, text: str, at: int) -> int | None:
        """A property's name and what ends it; or neither, before the next parameter's value."""
        key = self._key(text, at)
        if isinstance(key, tuple):
            return self._begin_item(*key)
        if key is NEEDS_MORE:
            return None
        if len(self._stack) > 1 or self._num_items >= len(self._listed):
            return self._fail(at)
        return self._begin_item(self._listed[self._num_items], at)

    def _begin_item(self, name: str, end: int) -> int:
        self._num_items += len(self._stack) == 1
        self._separate()
        self._said += f"{json.dumps(name, ensure_ascii=False)}: "
        self._expected = "value"
        return end

    def _key(self, text: str, at: int) -> tuple[str, int] | Undecided:
        """A name that begins at `at`, and the place behind what ends it."""
        token = self._name_token(text, at)
        size = len(text) - at if token is None else token[1] - at
        if size > _MAX_TOKEN_CHARS or (token is None and not self._may_be_name(text, at)):
            return FAILED
        if token is None:
            return NEEDS_MORE
        end = after_blanks(text, token[1])
        if end == len(text):
            return NEEDS_MORE
        return (token[0], end + 1) if text[end] == self._stack[-1].key_end else FAILED

    def _may_be_name(self, text: str, at: int) -> bool:
        marks = ('"', "'", *filter(None, (self._quote,)))
        return match_any(text, at, marks) is not FAILED or _NAME.match(text, at) is not None

    def _name_token(self, text: str, at: int) -> tuple[str, int] | None:
        """A name, with or without quotes, and where it ends; None where that is not known."""
        if self._quote and text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = text.find(self._quote, begin)
            return None if end < 0 else (text[begin:end], end + len(self._quote))
        found = _QUOTED.match(text, at)
        if found is not None:
            return found[2], found.end()
        found = _NAME.match(text, at)
        return None if found is None or found.end() == len(text) else (found[0], found.end())

    def _value(self, text: str, at: int, is_last: bool) -> int | None:
        """The beginning of a string, object or array, or a whole word or number."""
        if text[at] in _CLOSING:
            return self._bracket(text, at, is_last)
        for quote in filter(None, (self._quote, '"', "'")):
            if text.startswith(quote, at):
                self._begin_value('"')
                self._string = quote
                return at + len(quote)
        if at + len(self._quote) > len(text) and self._quote.startswith(text[at:]):
            return None
        end = self._bare_end(text, at, is_last) if self._quote else self._word_end(text, at)
        if end is None or end - at > _MAX_TOKEN_CHARS:
            is_long = len(text) - at > _MAX_TOKEN_CHARS
            return self._fail(at) if end is not None or is_long else None
        if end == len(text) and not is_last:
            return None
        self._begin_value(_word(text[at:end].rstrip()))
        self._expected = "more"
        return end

    def _bracket(self, text: str, at: int, is_last: bool) -> int | None:
        """The beginning of an object or array."""
        if len(self._stack) == MAX_DEPTH:
            return self._fail(at)
        is_object = text[at] == "{"
        if is_object and not self._quote:
            is_set = self._is_set(text, after_blanks(text, at + 1))
            if is_set is None and not is_last:
                return None
            is_object = not is_set
        self._begin_value("{" if is_object else "[")
        self._stack.append(_Open(is_object, _CLOSING[text[at]], ":"))
        self._expected = "item"
        return at + 1

    def _is_set(self, text: str, at: int) -> bool | None:
        """Whether the items behind a brace have no names; None: not yet known."""
        if at == len(text):
            return None
        if text[at] in _CLOSING:
            return True
        token = self._name_token(text, at)
        if token is None:
            is_open = self._may_be_name(text, at) and len(text) - at <= _MAX_TOKEN_CHARS
            return None if is_open else False
        follows = after_blanks(text, token[1])
        return None if follows == len(text) else text[follows] in ",}"

    def _word_end(self, text: str, at: int) -> int:
        """The end of a word or number; beyond all bounds where there is none."""
        found = _NAME.match(text, at)
        return found.end() if found is not None else at + _MAX_TOKEN_CHARS + 1

    def _bare_end(self, text: str, at: int, is_last: bool) -> int | None:
        """The end of a word, number or string without marks: before the closing bracket, or before
        a comma behind which another item stands. None: not yet known."""
        around = self._stack[-1]
        for found in _BARE_ENDS.finditer(text, at):
            end, follows = found.start(), after_blanks(text, found.end())
            if found[0] in (around.closing, "<"):
                return end
            if found[0] != ",":
                continue
            if not around.is_object or text[follows : follows + 1] == around.closing:
                return end
            key = self._key(text, follows)
            if key is NEEDS_MORE and not is_last:
                return None
            if key is not FAILED:
                return end
        return len(text)

    def _begin_value(self, said: str) -> None:
        if not self._stack[-1].is_object:
            self._separate()
        self._said += said

    def _separate(self) -> None:
        """A comma behind an earlier item; one behind the last is no JSON."""
        self._said += ", " if self._stack[-1].has_items else ""
        self._stack[-1].has_items = True

    def _more_of_string(self, text: str, at: int, quote: str, is_last: bool) -> int | None:
        if quote == self._quote:
            end, escape = text.find(quote, at), -1
        else:  # the next of both: looking for each alone would pass the same text many times
            found = _ENDS[quote].search(text, at)
            place = -1 if found is None else found.start()
            is_escape = found is not None and found[0] == "\\"
            end, escape = (-1, place) if is_escape else (place, -1)
        if escape >= 0:
            return self._escaped(text, at, escape)
        if end >= 0:
            is_end = quote == self._quote or _is_closing(text, end + 1, is_last)
            if not is_end:  # of the text, or not yet known
                end += is_end is False
                self._say(text[at:end])
                return end if end > at else None
            self._say(text[at:end])
            self._said += '"'
            self._string, self._expected = None, "more"
            return end + len(quote)
        end = len(text) - (0 if is_last else overlap(text[-len(quote) :], quote))
        self._say(text[at:end])
        return end if end > at else None

    def _escaped(self, text: str, at: int, escape: int) -> int | None:
        """A string's text up to an escape, and that."""
        self._say(text[at:escape])
        found = _escape(text, escape)
        if found is None:
            return escape if escape > at else None
        said, end = found
        self._said += said
        return end

    def _say(self, text: str) -> None:
        self._said += json.dumps(text, ensure_ascii=False)[1:-1]


def _is_closing(text: str, at: int, is_last: bool) -> bool | None:
    """Whether the quote before `at` closes a string: models do not escape all quotes within one.
    None: not yet known."""
    follows = after_blanks(text, at)
    rest = text[follows : follows + 2]
    if rest in ("", "<") and not is_last:
        return None
    return rest == "<|" or rest[:1] in ("", *",:)]}")


def _word(word: str) -> str:
    """A number or a constant as JSON; any other word is a string."""
    if word in _WORDS or _NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    if _INTEGER.fullmatch(word):
        return str(int(word))
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    return json.dumps(number if math.isfinite(number) else word, ensure_ascii=False)


def _escape(text: str, at: int) -> tuple[str, int] | None:
    r"""JSON of the escape \.. at `at`, and its end; None where it may not be whole. What is no
    escape stands for itself."""
    if at + 1 >= len(text):
        return None
    char = text[at + 1]
    size = _HEX_DIGITS.get(char)
    if size is None:
        said = _SIMPLE.get(char)
        return ("\\\\", at + 1) if said is None else (said, at + 2)
    digits = text[at + 2 : at + 2 + size]
    if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return "\\\\", at + 1
    if len(digits) < size:
        return None
    code = int(digits, 16)
    if code > 0x10FFFF:
        return "\\\\", at + 1
    said = f"\\u{code:04x}" if code < 0x10000 else json.dumps(chr(code), ensure_ascii=False)[1:-1]
    return said, at + 2 + size
