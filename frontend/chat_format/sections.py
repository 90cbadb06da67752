"""Marks around calls: those of one call, and those of the section in which calls stand.

<calls> <call>...</call> <call>...</call> </calls>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .contents import Content, in_sequence, one_of, separated, tag, text
from .matching import FAILED, NEEDS_MORE, Undecided, match_parts
from .tool_format import Tail


@dataclass(frozen=True, slots=True)
class Section:
    """The marks. `begin` and `end` are "" where calls stand in no section, `call_begin` where a
    section is a call. `holds_one`: each call is written in a section of its own. A call that lacks
    its section, and several in one, are read all the same."""

    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: Sequence[str] = ()
    holds_one: bool = False

    @property
    def triggers(self) -> Sequence[str]:
        return tuple(filter(None, (self.begin, self.call_begin)))

    def opened(self, source: str, at: int) -> int | Undecided:
        """Where the call behind a trigger that ends at `at` goes on after its mark."""
        if not self.call_begin or source[:at] == self.call_begin:
            return at
        return match_parts(source, at, (self.call_begin,))

    def closed(self, source: str, *, is_last: bool) -> Tail | Undecided:
        """What follows a call's arguments."""
        end = match_parts(source, 0, self.call_end)
        if end is NEEDS_MORE and not is_last:
            return NEEDS_MORE
        at = end if isinstance(end, int) else 0
        section = match_parts(source, at, (self.end,)) if self.end else FAILED
        if isinstance(section, int):
            return Tail(section)
        again = match_parts(source, at, (self.call_begin,)) if self.call_begin else FAILED
        if isinstance(again, int):
            return Tail(at, goes_on=True)
        if NEEDS_MORE in (end, section, again):  # at the end a part of a mark is one
            return Tail(len(source)) if is_last else NEEDS_MORE
        return Tail(at) if isinstance(end, int) else FAILED


def section_tags(
    section: Section,
    calls: Sequence[Content],
    *,
    is_parallel: bool,
    inner: tuple[str, str, str] = ("", "", ""),
) -> Sequence[Content]:
    """Tags of these calls, each a `tag` that begins with its mark: the section of several, and, as
    they are read without one, each alone. `inner`: what stands behind the section's begin, between
    calls, and before the section's end."""
    whole = section_of(section, calls, is_parallel=is_parallel, inner=inner)
    alone = calls if section.begin and section.call_begin else ()
    return (*whole, *alone)


def section_of(
    section: Section,
    calls: Sequence[Content],
    *,
    is_parallel: bool,
    inner: tuple[str, str, str] = ("", "", ""),
) -> Sequence[Content]:
    """The section of one call or several; where there are no sections, the calls."""
    if not section.begin:
        return calls
    behind, between, before = inner
    is_several = is_parallel and bool(section.call_begin) and not section.holds_one
    content = separated(one_of(calls), between, is_repeated=is_several)
    if behind:
        content = in_sequence(text(behind), content)
    return (tag(section.begin, content, before + section.end),)
