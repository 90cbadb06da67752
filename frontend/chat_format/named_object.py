"""A call as one object, {"name": "weather", "arguments": ...}: its head, and a whole output forced
to be one."""

from __future__ import annotations

from collections.abc import Sequence

from .matching import FAILED, NEEDS_MORE, VALUE, Part, Undecided, match_name, match_parts
from .tool_format import Head, Tail, ToolFormat, first_end

_OPENINGS: tuple[tuple[Part, ...], ...] = (
    ("{", '"name"', ":", '"'),
    ("{", '"type"', ":", '"function"', ",", '"name"', ":", '"'),
)


def named_head(text: str, at: int, keys: Sequence[str]) -> Head | Undecided:
    """An object's beginning up to its arguments, whose key is one of `keys`."""
    opening = _one_of([match_parts(text, at, parts) for parts in _OPENINGS])
    if isinstance(opening, Undecided):
        return opening
    found = match_name(text, opening, end='"')
    if isinstance(found, Undecided):
        return found
    name, end = found
    start = _one_of([match_parts(text, end, (",", f'"{key}"', ":", VALUE)) for key in keys])
    return start if isinstance(start, Undecided) else Head(name, start)


def _one_of(ends: Sequence[int | Undecided]) -> int | Undecided:
    """The one that matches; at most one can."""
    matches = [end for end in ends if isinstance(end, int)]
    return matches[0] if matches else (NEEDS_MORE if NEEDS_MORE in ends else FAILED)


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
