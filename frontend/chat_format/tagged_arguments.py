"""Arguments that are written one by one between tags, without quotes, read as a JSON object.

A value that can only be a string is told as it comes. Any other is told once it is whole: as JSON
where it is JSON of a kind that its schema allows, else as a string. Where it cannot be a string, an
array or object may also be one of Python's.

A value that lacks its closing tag ends before a listed parameter that was not given, and before
what ends the call, if the text ends there or another call begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import Taken
from .literal_arguments import LiteralArguments
from .matching import FAILED, NEEDS_MORE, Undecided, after_blanks, match_any, match_parts, overlap
from .value_kinds import STRING, Kinds, kind_of, parameter_kinds, parameter_names

_MAX_NAME_CHARS = 256
_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class ParameterTags:
    """KEY_BEGIN name KEY_END value VALUE_END; one of `ends` follows the last. `is_padded`: a line
    end on each side of the value is not of it."""

    key_begin: str
    key_end: Sequence[str]
    value_end: str
    ends: Sequence[str]
    is_padded: bool = False


class TaggedArguments:
    """Reads the arguments of one call; `schema`: theirs, None where it is not known; `begins`:
    what begins another call, as it is written."""

    def __init__(self, tags: ParameterTags, schema: object, begins: str) -> None:
        self._tags = tags
        self._marks = (tags.key_begin, *tags.ends)  # what may stand behind a value
        self._open_ends = re.compile("|".join(map(re.escape, (tags.key_begin, tags.ends[0]))))
        self._begins = begins
        self._schema = schema
        self._awaited = set(parameter_names(schema))  # listed, and not yet given
        self._kinds: Kinds | None = None  # of the value that is being read
        self._is_fresh = False  # nothing of it was read
        self._num_searched = 0  # characters of it without its end
        self._has_some = False
        self._is_over = False
        self._said = ""

    def read(self, text: str, *, is_last: bool) -> Taken:
        at, step = 0, self._step(text, 0, is_last)
        while step is not None:
            at = step
            step = None if self._is_over else self._step(text, at, is_last)
        said, self._said = self._said, ""
        return Taken(said, at, self._is_over)

    def _step(self, text: str, at: int, is_last: bool) -> int | None:
        """Reads on from `at`; returns where to go on, or None where more is needed."""
        if self._kinds is None:
            return self._between(text, at)
        if self._is_fresh and self._tags.is_padded:
            if at == len(text):
                return None
            self._is_fresh = False
            return at + (text[at] == "\n")
        read = self._string if self._kinds == STRING else self._value
        return read(text, at, is_last)

    def _between(self, text: str, at: int) -> int | None:
        start, key_begin = after_blanks(text, at), self._tags.key_begin
        if text.startswith(key_begin, start):
            return self._key(text, start + len(key_begin))
        if match_any(text, start, self._marks) is NEEDS_MORE:
            return None
        self._said += "}" if self._has_some else "{}"
        self._is_over = True
        return at

    def _key(self, text: str, at: int) -> int | None:
        """A parameter's name that begins at `at`."""
        end = text.find(self._tags.key_end[0], at, at + _MAX_NAME_CHARS)
        behind = NEEDS_MORE if len(text) < at + _MAX_NAME_CHARS else FAILED
        found: int | Undecided = behind if end < 0 else match_parts(text, end, self._tags.key_end)
        if found is NEEDS_MORE:
            return None
        if found is FAILED:
            self._is_over = True
            return at
        assert isinstance(found, int)
        name = text[at:end].strip()
        self._kinds = parameter_kinds(self._schema, name)
        self._awaited.discard(name)
        self._is_fresh, self._num_searched = True, 0
        opening = ", " if self._has_some else "{"
        quote = '"' if self._kinds == STRING else ""
        self._said += f"{opening}{json.dumps(name, ensure_ascii=False)}: {quote}"
        self._has_some = True
        return found

    def _string(self, text: str, at: int, is_last: bool) -> int | None:
        """More of a value that is a string."""
        end, behind = self._end(text, at, is_last)
        if behind is None and is_last:
            self._say_text(text[at:end])
            return end if end > at else None
        value = self._without_line_end(text, at, end)  # or that waits for what follows
        self._say_text(value)
        if behind is None:
            return at + len(value) if value else None
        self._said += '"'
        self._kinds = None
        return behind

    def _value(self, text: str, at: int, is_last: bool) -> int | None:
        """A value that may be no string; it waits until it is whole."""
        assert self._kinds is not None
        end, behind = self._end(text, at + self._num_searched, is_last)
        if behind is None and not is_last:
            self._num_searched = end - at
            return None
        if behind is None:
            raw, is_text = text[at:end], "string" in self._kinds
            self._said += json.dumps(raw, ensure_ascii=False)[:-1] if is_text else raw
            self._is_over = True
            return end
        self._said += _json_of(self._without_line_end(text, at, end), self._kinds)
        self._kinds = None
        return behind

    def _without_line_end(self, text: str, at: int, end: int) -> str:
        """A value without the line end before its closing tag, or before what follows instead."""
        value = text[at:end]
        is_closed = text.startswith(self._tags.value_end, end)
        return value if is_closed and not self._tags.is_padded else value.removesuffix("\n")

    def _end(self, text: str, at: int, is_last: bool) -> tuple[int, int | None]:
        """Where a value ends, and where to go on behind it; None: how far the text is the value's
        for sure."""
        closed = self._closed(text, at, is_last)
        return self._left_open(text, at, closed[0], is_last) or closed

    def _closed(self, text: str, at: int, is_last: bool) -> tuple[int, int | None]:
        """By its closing tag. One that nothing known follows is of the value."""
        mark = self._tags.value_end
        while (found := text.find(mark, at)) >= 0:
            behind = found + len(mark)
            follows = match_any(text, after_blanks(text, behind), self._marks)
            if follows is not FAILED:
                return found, behind if isinstance(follows, int) or is_last else None
            at = behind
        num_open = max(overlap(text, mark) for mark in (mark, *self._marks))
        return len(text) - (0 if is_last else num_open), None

    def _left_open(
        self, text: str, at: int, end: int, is_last: bool
    ) -> tuple[int, int | None] | None:
        """Without it, before `end`; None: nowhere."""
        for found in self._open_ends.finditer(text, at, end):
            start = found.start()
            is_key = found[0] == self._tags.key_begin
            is_end = (self._is_awaited if is_key else self._is_call_end)(text, start, is_last)
            if is_end is not False:
                return start, start if is_end else None
        return None

    def _is_awaited(self, text: str, at: int, is_last: bool) -> bool | None:
        """Whether the parameter that begins at `at` is listed and not yet given; None: not yet
        known."""
        begin, key_end = at + len(self._tags.key_begin), self._tags.key_end[0]
        keys = [name + key_end for name in self._awaited]
        if text.startswith(tuple(keys), begin):
            return True
        is_open = any(key.startswith(text[begin:]) for key in keys)
        return None if is_open and not is_last else False

    def _is_call_end(self, text: str, at: int, is_last: bool) -> bool | None:
        """Whether the call ends at `at`, and the text with it, or another call begins; None: not
        yet known."""
        while mark := next((m for m in self._tags.ends if text.startswith(m, at)), ""):
            at = after_blanks(text, at + len(mark))
        if at == len(text):
            return True if is_last else None
        follows = match_any(text, at, (self._begins, *self._tags.ends))
        if follows is NEEDS_MORE:
            return True if is_last else None
        return follows is not FAILED

    def _say_text(self, text: str) -> None:
        self._said += json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(raw: str, kinds: Kinds) -> str:
    """A value as JSON of one of these kinds if it is that, else as a string."""
    text = raw.strip()
    text = _WORDS.get(text, text)
    try:
        kind = kind_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        kind = "string"
    if kind in kinds - STRING:
        return text
    found = _python_value(text) if not kinds & STRING else None
    if found is not None and kind_of(found) in kinds:
        return json.dumps(found, ensure_ascii=False)
    return json.dumps(raw, ensure_ascii=False)


def _python_value(text: str) -> object:
    """An array or object as Python writes it, or True and False in other letters; else None."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text[:1] not in ("[", "{"):
        return None
    named = f"v:{text}}}"
    taken = LiteralArguments(closing="}", key_end=":").read(named, is_last=True)
    try:
        return json.loads(taken.json)["v"] if taken.num_chars == len(named) else None
    except ValueError:
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
