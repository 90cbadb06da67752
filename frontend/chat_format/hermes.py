"""Calls as models of the Hermes and Qwen families write them, each in a pair of tags:

<tool_call>
{"name": "weather", "arguments": {"city": "Ulm"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence

from .contents import Content, document, one_of, tag
from .matching import Undecided, match_parts
from .named_object import named_head
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail, first_end

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(MarkedCalls):
    """The format; it has no state."""

    triggers = (BEGIN,)
    grammar_triggers = (BEGIN,)
    is_forced_as_json = True

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        return [
            tag(f'{BEGIN}\n{{"name": "{f.name}", "arguments": ', document(f.schema), f"}}\n{END}")
            for f in functions
        ]

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        return one_of(self.tags(functions, is_parallel=False))

    def head(self, text: str, at: int) -> Head | Undecided:
        return named_head(text, at, ("arguments", "parameters"))

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        ends = [match_parts(text, 0, parts) for parts in (("}", END), ("}",), (END,))]
        end = first_end(ends, is_last=is_last, text=text)
        return Tail(end) if isinstance(end, int) else end
