"""A whole output forced to be a call: {"name": "weather", "arguments": ...}."""

from __future__ import annotations

from .matching import Undecided, match_parts
from .named_object import named_head
from .tool_format import Head, Tail, ToolFormat, first_end


class Forced:
    """The format; ids are those of the model's own format, if any."""

    triggers = ()
    begins_at_start = True

    def __init__(self, taught: ToolFormat) -> None:
        self._taught = taught

    def head(self, text: str, at: int) -> Head | Undecided:
        return named_head(text, at, ("arguments",))

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        end = first_end([match_parts(text, 0, ("}",))], is_last=is_last, text=text)
        return Tail(end) if isinstance(end, int) else end

    def new_id(self) -> str:
        return self._taught.new_id()
