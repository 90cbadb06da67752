"""Calls as Mistral's models write them: the older ones in an array, the newer ones one by one:

[TOOL_CALLS] [{"name": "weather", "arguments": {}}, {"name": "clock", "arguments": {}}]
[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}[TOOL_CALLS]clock[CALL_ID]8a1b2c3d4[ARGS]{}
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .contents import Content, document, one_of, tag
from .matching import FAILED, NEEDS_MORE, VALUE, Undecided, match_name, match_parts
from .named_object import array_tail, named_head
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail

TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_CHARS = 9  # their templates refuse other ids
_ID = re.compile(r"[a-zA-Z0-9]{9}")
_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Mistral(MarkedCalls):
    """The format; `is_newer`: which of the two the model was trained on. Both are read."""

    is_newer: bool = False
    triggers = (TOOL_CALLS,)
    grammar_triggers = (TOOL_CALLS,)
    needs_no_grammar = True
    is_forced_as_json = True

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        begin, end = TOOL_CALLS + ' [{{"name": "{name}", "arguments": ', "}]"
        if self.is_newer:
            begin, end = TOOL_CALLS + "{name}" + ARGS, ""
        return [tag(begin.format(name=f.name), document(f.schema), end) for f in functions]

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        return one_of(self.tags(functions, is_parallel=False))

    def head(self, text: str, at: int) -> Head | Undecided:
        opening = match_parts(text, at, ("[",))
        if isinstance(opening, int):
            return named_head(text, opening, _KEYS)
        start = match_parts(text, at, ())
        assert isinstance(start, int)
        item = named_head(text, start, _KEYS)  # the next call of an array
        return _newer_head(text, start) if item is FAILED else item

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        return array_tail(text, is_last=is_last)

    def new_id(self) -> str:
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(_ID_CHARS))

    def known_id(self, call_id: str) -> str:
        if _ID.fullmatch(call_id):
            return call_id
        return blake2b(call_id.encode("utf-8", "replace"), digest_size=5).hexdigest()[:_ID_CHARS]


def _newer_head(text: str, at: int) -> Head | Undecided:
    """NAME[ARGS] or NAME[CALL_ID]ID[ARGS] or, in some models, NAME alone before an object."""
    plain = match_name(text, at, end=ARGS)
    if isinstance(plain, tuple):
        return _before_value(text, *plain)
    with_id = match_name(text, at, end=CALL_ID)
    if isinstance(with_id, tuple):
        call_id = match_name(text, with_id[1], end=ARGS)
        if isinstance(call_id, tuple):
            written = call_id[0] if _ID.fullmatch(call_id[0]) else None
            return _before_value(text, with_id[0], call_id[1], written)
        return call_id
    bare = match_name(text, at, end="{")
    if isinstance(bare, tuple):
        return Head(bare[0], bare[1] - 1)
    return NEEDS_MORE if NEEDS_MORE in (plain, with_id, bare) else FAILED


def _before_value(text: str, name: str, at: int, call_id: str | None = None) -> Head | Undecided:
    start = match_parts(text, at, (VALUE,))
    return start if isinstance(start, Undecided) else Head(name, start, call_id)
