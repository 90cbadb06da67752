"""Calls whose arguments stand one by one between tags, strings as they are and all else as JSON:

<tool_call>                       <tool_call>weather
<function=weather>                <arg_key>city</arg_key>
<parameter=city>                  <arg_value>Ulm</arg_value>
Ulm                               </tool_call>
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import ArgumentsReader
from .contents import Content, one_of, parameters, tag
from .matching import Undecided, after_blanks, match_any, match_word
from .sections import Section, section_of, section_tags
from .tagged_arguments import ParameterTags, TaggedArguments
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail


@dataclass(frozen=True, slots=True)
class TaggedCalls(MarkedCalls):
    """The format: a call's mark, the name, `name_end`, the parameters.

    `name_end`: "" where the parameters' own tags end the name. `line_end`: what is written behind
    each part, `between_key_and_value`: and within one.
    """

    section: Section
    parameters: ParameterTags
    name_end: str
    line_end: str = "\n"
    between_key_and_value: str = ""

    @property
    def triggers(self) -> Sequence[str]:
        return self.section.triggers

    @property
    def grammar_triggers(self) -> Sequence[str]:
        return self.triggers

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        calls = [self._call(function) for function in functions]
        return section_tags(self.section, calls, is_parallel=is_parallel, inner=self._inner)

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        calls = [self._call(function) for function in functions]
        return one_of(section_of(self.section, calls, is_parallel=False, inner=self._inner))

    def head(self, text: str, at: int) -> Head | Undecided:
        opened = self.section.opened(text, at)
        if isinstance(opened, Undecided):
            return opened
        found = match_word(text, after_blanks(text, opened))
        if isinstance(found, Undecided):
            return found
        name, end = found
        marks = (self.name_end,) if self.name_end else self._behind_name
        behind = match_any(text, end if self.name_end else after_blanks(text, end), marks)
        return behind if isinstance(behind, Undecided) else Head(name, end + len(self.name_end))

    def arguments(self, head: Head, schema: object) -> ArgumentsReader:
        return TaggedArguments(self.parameters, schema, begins=self.triggers[0])

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        return self.section.closed(text, is_last=is_last)

    @property
    def _inner(self) -> tuple[str, str, str]:
        line_end = self.line_end if self.section.call_begin else ""
        return line_end, line_end, line_end

    @property
    def _behind_name(self) -> tuple[str, ...]:
        return (self.parameters.key_begin, *self.parameters.ends)

    def _call(self, function: OfferedFunction) -> Content:
        tags, padding = self.parameters, "\n" if self.parameters.is_padded else ""
        style = {
            "key_begin": tags.key_begin,
            "key_end": self.between_key_and_value.join(tags.key_end) + padding,
            "value_end": padding + tags.value_end + self.line_end,
            "excludes": tags.value_end,
        }
        begin = f"{self.section.call_begin}{function.name}{self.name_end}{self.line_end}"
        end = "".join(self.section.call_end)
        return tag(begin, parameters(function.schema, style), end)
