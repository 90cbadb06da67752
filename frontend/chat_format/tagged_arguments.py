"""Arguments that are written one by one between tags, without quotes, read as a JSON object.

A value that can only be a string is told as it comes. Any other is told once it is whole: as JSON
where it is JSON of a kind that its schema allows, else as a string. Where it cannot be a string, an
array or object may also be one of Python's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import Taken
from .literal_arguments import LiteralArguments
from .matching import FAILED, NEEDS_MORE, Undecided, after_blanks, match_any, match_parts, overlap
from .value_kinds import STRING, Kinds, kind_of, parameter_kinds

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
    """Reads the arguments of one call; `schema`: theirs, None where it is not known."""

    def __init__(self, tags: ParameterTags, schema: object) -> None:
        self._tags = tags
        self._marks = (tags.key_begin, *tags.ends)  # what may stand behind a value
        self._schema = schema
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
        self._is_fresh, self._num_searched = True, 0
        opening = ", " if self._has_some else "{"
        quote = '"' if self._kinds == STRING else ""
        self._said += f"{opening}{json.dumps(name, ensure_ascii=False)}: {quote}"
        self._has_some = True
        return found

    def _string(self, text: str, at: int, is_last: bool) -> int | None:
        """More of a value that is a string."""
        end, behind = self._end(text, at, is_last)
        value = text[at:end]
        if behind is None and is_last:
            self._say_text(value)
            return end if value else None
        if self._tags.is_padded and value.endswith("\n"):
            value = value[:-1]  # the line end before the closing tag, or it waits for that
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
        raw = text[at:end]
        if behind is None:
            is_text = "string" in self._kinds
            self._said += json.dumps(raw, ensure_ascii=False)[:-1] if is_text else raw
            self._is_over = True
            return end
        self._said += _json_of(raw.removesuffix("\n") if self._tags.is_padded else raw, self._kinds)
        self._kinds = None
        return behind

    def _end(self, text: str, at: int, is_last: bool) -> tuple[int, int | None]:
        """Where a value ends, and where its closing tag does; without one, how far the text is the
        value's for sure. A closing tag that nothing known follows is of the value."""
        mark = self._tags.value_end
        while (found := text.find(mark, at)) >= 0:
            behind = found + len(mark)
            follows = match_any(text, after_blanks(text, behind), self._marks)
            if follows is not FAILED:
                return found, behind if isinstance(follows, int) or is_last else None
            at = behind
        return len(text) - (0 if is_last else overlap(text, mark)), None

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
