"""A call as one object, {"name": "weather", "arguments": ...}: its head, arrays of such objects,
and a whole output forced to be one.

An object whose parts stand in another order, or that lacks arguments, is read once it is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import ArgumentsReader, JsonArguments, object_in
from .contents import Content, document, one_of, separated, tag
from .matching import (
    FAILED,
    NEEDS_MORE,
    STRING,
    VALUE,
    Part,
    Undecided,
    ValueScanner,
    after_blanks,
    is_name,
    match_name,
    match_parts,
)
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail, ToolFormat, first_end

Openings = Sequence[Sequence[Part]]
_OPENINGS: Openings = (
    ("{", '"name"', ":", '"'),
    ("{", '"type"', ":", '"function"', ",", '"name"', ":", '"'),
)
_KEYS = ("arguments", "parameters")
_FIRST_KEY = re.compile(r'\{\s*"([a-z_]{1,32})"')
_FIRST_KEYS = frozenset((*_KEYS, "name", "tool_name", "id", "tool_call_id", "type", "function"))
_MAX_OBJECT_CHARS = 4096  # of one that is waited for; guess


def named_head(
    text: str, at: int, keys: Sequence[str], openings: Openings = _OPENINGS
) -> Head | Undecided:
    """A call that begins at `at`, behind a mark: its object's beginning up to the arguments, whose
    key is one of `keys`, or else up to its end."""
    head = leading_head(text, at, keys, openings)
    return whole_head(text, at, keys) if head is FAILED else head


def leading_head(
    text: str, at: int, keys: Sequence[str], openings: Openings = _OPENINGS
) -> Head | Undecided:
    """An object's beginning up to its arguments, which follow its name."""
    opening = _one_of([match_parts(text, at, parts) for parts in openings])
    if isinstance(opening, Undecided):
        return opening
    found = match_name(text, opening, end='"')
    if isinstance(found, Undecided):
        return found
    name, end = found
    start = _one_of([match_parts(text, end, (",", f'"{key}"', ":", VALUE)) for key in keys])
    return start if isinstance(start, Undecided) else Head(name, start)


def whole_head(text: str, at: int, keys: Sequence[str]) -> Head | Undecided:
    """A whole object that names a function, up to its closing bracket."""
    opening = match_parts(text, at, ("{", STRING, ":"))
    if isinstance(opening, Undecided):
        return opening
    begin = after_blanks(text, at)
    first = _FIRST_KEY.match(text, begin)
    if first is None or first[1] not in _FIRST_KEYS:
        return FAILED
    size = ValueScanner().end_in(text[begin : begin + _MAX_OBJECT_CHARS])
    if size is None:
        return NEEDS_MORE if len(text) < begin + _MAX_OBJECT_CHARS else FAILED
    try:
        said = json.loads(text[begin : begin + size])
    except (ValueError, RecursionError):
        return FAILED
    return _head_of(said, keys, begin + size - 1) if isinstance(said, dict) else FAILED


def _head_of(said: Mapping[str, Any], keys: Sequence[str], end: int) -> Head | Undecided:
    """{"name", "arguments"}, also as {"function": {..}} and {"function": name, "arguments"}."""
    function = said.get("function")
    inner = function if isinstance(function, dict) else said
    names = (inner.get("name"), inner.get("tool_name"), function)
    name = next((name for name in names if isinstance(name, str)), "")
    if not is_name(name):
        return FAILED
    arguments = next((inner[key] for key in keys if key in inner), None)
    written = json.dumps(arguments, ensure_ascii=False)
    return Head(name, end, is_json=True, arguments=object_in(written))


def array_tail(text: str, *, is_last: bool, end_mark: str = "") -> Tail | Undecided:
    """What follows the arguments of an object in an array, which `end_mark` may follow. Both may be
    missing; the object may have the call's id behind its arguments."""
    closings: Openings = (("}",), (",", '"id"', ":", STRING, "}"))
    end = first_end([match_parts(text, 0, c) for c in closings], is_last=is_last, text=text)
    if not isinstance(end, int):
        return end
    follows = match_parts(text, end, (",", "{"))
    if isinstance(follows, int):
        comma = match_parts(text, end, (",",))
        assert isinstance(comma, int)
        return Tail(comma, goes_on=True)
    endings: Openings = (("]", end_mark), ("]",)) if end_mark else (("]",),)
    closed = [match_parts(text, end, parts) for parts in endings]
    closing = first_end(closed, is_last=is_last, text=text)
    if isinstance(closing, int):
        return Tail(closing)
    return NEEDS_MORE if NEEDS_MORE in (follows, closing) and not is_last else Tail(end)


def _one_of(ends: Sequence[int | Undecided]) -> int | Undecided:
    """The one that matches; at most one can."""
    matches = [end for end in ends if isinstance(end, int)]
    return matches[0] if matches else (NEEDS_MORE if NEEDS_MORE in ends else FAILED)


@dataclass(frozen=True, slots=True)
class ArrayCalls(MarkedCalls):
    """Calls in an array behind a mark, of which there may be several: the first is written.

    `openings`: how an object begins, up to the name; `written`: the same with the name as {name},
    up to the arguments.
    """

    triggers: Sequence[str]
    end: str = ""
    wrappings: Sequence[str] = ()
    openings: Openings = _OPENINGS
    written: str = '{{"name": "{name}", "arguments": '

    @property
    def grammar_triggers(self) -> Sequence[str]:
        return self.triggers

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        objects = [
            tag(self.written.format(name=f.name), document(f.schema), "}") for f in functions
        ]
        array = separated(one_of(objects), ", ", is_repeated=is_parallel)
        return [tag(f"{trigger}[", array, f"]{self.end}") for trigger in self.triggers]

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        return self.tags(functions, is_parallel=False)[0]

    def head(self, text: str, at: int) -> Head | Undecided:
        opening = match_parts(text, at, ("[",))
        start = opening if isinstance(opening, int) else at  # or the next object of an array
        return named_head(text, start, _KEYS, self.openings)

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        return array_tail(text, is_last=is_last, end_mark=self.end)


class Forced:
    """The format; ids are those of the model's own format, if any."""

    triggers = ()
    begins_at_start = True

    def __init__(self, taught: ToolFormat) -> None:
        self._taught = taught

    def head(self, text: str, at: int) -> Head | Undecided:
        return leading_head(text, at, ("arguments",))

    def arguments(self, head: Head, schema: object) -> ArgumentsReader:
        return JsonArguments()

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        end = first_end([match_parts(text, 0, ("}",))], is_last=is_last, text=text)
        return Tail(end) if isinstance(end, int) else end

    def new_id(self) -> str:
        return self._taught.new_id()
