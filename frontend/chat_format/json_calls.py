"""Calls whose arguments are JSON, with the name before them:

<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Ulm"}<|tool_call_end|>
<function=weather>{"city": "Ulm"}</function>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .contents import Content, document, in_sequence, one_of, pattern, tag, text
from .matching import (
    FAILED,
    NEEDS_MORE,
    OBJECT,
    VALUE,
    Undecided,
    after_blanks,
    match_any,
    match_parts,
    match_word,
)
from .sections import Section, section_of, section_tags
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail

_NUMBER = re.compile(r":[0-9]{1,6}")


@dataclass(frozen=True, slots=True)
class JsonCalls(MarkedCalls):
    """The format: a call's mark, `before_name`, the name, `name_end`, `behind_name`, the arguments.

    `is_numbered`: the name has a namespace before it and a number behind it, and all of that is the
    call's id: functions.weather:0. `glue`: blanks before the arguments, `before_end`: those behind,
    `between`: those between calls. `begins_at_start`: the generation prompt ends with the mark.
    """

    section: Section
    before_name: Sequence[str] = ()
    name_end: str = ""
    behind_name: Sequence[str] = ()
    is_numbered: bool = False
    glue: str = ""
    before_end: str = ""
    between: str = ""
    begins_at_start: bool = False
    opening: str = ""
    wrappings: Sequence[str] = ()

    @property
    def triggers(self) -> Sequence[str]:
        return self.section.triggers

    @property
    def grammar_triggers(self) -> Sequence[str]:
        return () if self.begins_at_start else self.triggers

    @property
    def needs_no_grammar(self) -> bool:
        return self.begins_at_start

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        inner = ("", self.between, "")
        calls = [self._call(function) for function in functions]
        return section_tags(self.section, calls, is_parallel=is_parallel, inner=inner)

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        calls = [self._call(function) for function in functions]
        return one_of(section_of(self.section, calls, is_parallel=False))

    def head(self, source: str, at: int) -> Head | Undecided:
        opened = at if self.begins_at_start else self.section.opened(source, at)
        if isinstance(opened, Undecided):
            return opened
        start = match_parts(source, opened, self.before_name)
        if isinstance(start, Undecided):
            return start
        start = after_blanks(source, start)
        named = self._numbered(source, start) if self.is_numbered else match_word(source, start)
        if isinstance(named, Undecided):
            return named
        name, end = named
        ended = match_any(source, end, (self.name_end,))
        if isinstance(ended, Undecided):
            return ended
        call_id = source[start:end] if self.is_numbered else None
        value = OBJECT if self.begins_at_start else VALUE  # where a word may be any word
        begin = match_parts(source, ended + len(self.name_end), (*self.behind_name, value))
        return begin if isinstance(begin, Undecided) else Head(name, begin, call_id)

    def tail(self, source: str, *, is_last: bool) -> Tail | Undecided:
        return Tail(0) if self.begins_at_start else self.section.closed(source, is_last=is_last)

    def _numbered(self, source: str, at: int) -> tuple[str, int] | Undecided:
        """The name in NAMESPACE.NAME:NUMBER, and the end of that; the namespace may be missing."""
        found = match_word(source, at)
        if isinstance(found, tuple) and source.startswith(".", found[1]):
            found = match_word(source, found[1] + 1)
        if isinstance(found, Undecided):
            return found
        name, end = found
        number = _NUMBER.match(source, end)
        if number is None:
            is_open = source.startswith(":", end) and end + 1 == len(source)
            return NEEDS_MORE if is_open else FAILED
        return NEEDS_MORE if number.end() == len(source) else (name, number.end())

    def _call(self, function: OfferedFunction) -> Content:
        mark = "" if self.begins_at_start else self.section.call_begin
        begin = mark + "".join(self.before_name)
        behind = self.name_end + "".join(self.behind_name) + self.glue
        arguments = document(function.schema)
        end = self.before_end + "".join(self.section.call_end)
        if not self.is_numbered:
            return tag(f"{begin}{function.name}{behind}", arguments, end)
        content = in_sequence(pattern("[0-9]{1,3}"), text(behind), arguments)
        return tag(f"{begin}functions.{function.name}:", content, end)
