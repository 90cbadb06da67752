"""Calls as models of the Hermes and Qwen families write them, each in a pair of tags:

<tool_call>
{"name": "weather", "arguments": {"city": "Ulm"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .matching import Undecided, match_parts
from .named_object import named_head
from .tool_format import Head, Tail, first_end, long_id

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes:
    """The format; it has no state."""

    triggers = (BEGIN,)
    begins_at_start = False
    needs_no_grammar = False

    def structures(self, name: str, schema: object) -> Sequence[dict[str, Any]]:
        begin = f'{BEGIN}\n{{"name": "{name}", "arguments": '
        return ({"begin": begin, "schema": schema, "end": f"}}\n{END}"},)

    def head(self, text: str, at: int) -> Head | Undecided:
        return named_head(text, at, ("arguments", "parameters"))

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        ends = [match_parts(text, 0, parts) for parts in (("}", END), ("}",), (END,))]
        end = first_end(ends, is_last=is_last, text=text)
        return Tail(end) if isinstance(end, int) else end

    def new_id(self) -> str:
        return long_id()
