"""Calls as Llama 3 models write them: the output is one call, or several with semicolons or commas
between them.

{"name": "weather", "parameters": {"city": "Ulm"}}
<|python_tag|>{"name": "weather", "parameters": {}}; {"name": "clock", "parameters": {}}
"""

from __future__ import annotations

from collections.abc import Sequence

from .contents import Content, document, one_of, tag
from .matching import FAILED, NEEDS_MORE, Part, Undecided, after_blanks, match_parts
from .named_object import leading_head, whole_head
from .tool_format import Head, MarkedCalls, OfferedFunction, Tail, first_end

PYTHON_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")
_SEPARATORS = (";", ",")
# An object that begins so is a call without a mark, too: an answer may be any other.
_OTHERWISE: Sequence[Sequence[Part]] = (
    ("{", '"type"', ":", '"function"', ","),
    ("{", '"parameters"', ":"),
)


class Llama3(MarkedCalls):
    """The format; it has no state."""

    triggers = (PYTHON_TAG,)
    grammar_triggers = ('{"name": "',)
    begins_at_start = True
    needs_no_grammar = True
    is_forced_as_json = True

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        return [
            tag(f'{{"name": "{f.name}", "parameters": ', document(f.schema), "}") for f in functions
        ]

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        return one_of(self.tags(functions, is_parallel=False))

    def head(self, text: str, at: int) -> Head | Undecided:
        head = leading_head(text, at, _KEYS)
        if head is not FAILED:
            return head
        begins = [match_parts(text, at, parts) for parts in _OTHERWISE]
        if any(isinstance(begin, int) for begin in begins):
            return whole_head(text, at, _KEYS)
        return NEEDS_MORE if NEEDS_MORE in begins else FAILED

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        end = first_end([match_parts(text, 0, ("}",))], is_last=is_last, text=text)
        if not isinstance(end, int):
            return end
        start = after_blanks(text, end)
        start += text[start : start + 1] in _SEPARATORS
        follows = self.head(text, start)
        if isinstance(follows, Head):
            return Tail(start, goes_on=True)
        return NEEDS_MORE if follows is NEEDS_MORE and not is_last else Tail(end)
