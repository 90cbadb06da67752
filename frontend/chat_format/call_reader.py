"""Parses content and tool calls out of an output as it streams.

A call is reported once its name is known, its arguments as they come. Nothing reported is taken
back, so a call that is cut off keeps its part. All other text is content, in order. The result does
not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .matching import FAILED, NEEDS_MORE, Undecided, ValueScanner, overlap
from .tool_format import Head, ToolFormat


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More JSON text of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of reasoning, from formats that have it between other messages."""

    text: str


Event = Content | CallBegun | Arguments | Reasoning


class Reader(Protocol):
    """Parses one output."""

    def feed(self, text: str) -> Sequence[Event]:
        """The events of fresh text."""

    def finish(self) -> Sequence[Event]:
        """The events of held text, when no more comes."""


class CallReader:
    """Reads calls of one format. Whitespace around calls is content only before other text."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._held = ""
        self._blanks = ""
        self._has_calls = False
        self._scanner = ValueScanner()
        self._events: list[Event] = []
        self._read = self._read_start if tool_format.begins_at_start else self._read_text

    def feed(self, text: str) -> Sequence[Event]:
        self._held += text
        return self._run(is_last=False)

    def finish(self) -> Sequence[Event]:
        events = [*self._run(is_last=True)]
        if self._blanks and not self._has_calls:
            events.append(Content(self._blanks))
        return events

    def _run(self, *, is_last: bool) -> Sequence[Event]:
        """Each state reads a part of the held text, until one needs more."""
        while self._held and self._read(is_last):
            pass
        events, self._events = self._events, []
        return events

    def _read_start(self, is_last: bool) -> bool:
        """Whether a call begins here without a trigger."""
        return self._read_head_at(0, is_last)

    def _read_text(self, is_last: bool) -> bool:
        begins = [(at, t) for t in self._format.triggers if (at := self._held.find(t)) >= 0]
        if begins:
            begin, trigger = min(begins)
            self._say(begin)
            self._trigger_chars = len(trigger)
            self._read = self._read_head
            return True
        num_kept = 0 if is_last else self._num_undecided()
        self._say(len(self._held) - num_kept)
        return False

    def _num_undecided(self) -> int:
        """Characters at the end that may be the beginning of a trigger."""
        return max((overlap(self._held, trigger) for trigger in self._format.triggers), default=0)

    def _read_head(self, is_last: bool) -> bool:
        return self._read_head_at(self._trigger_chars, is_last)

    def _read_head_at(self, at: int, is_last: bool) -> bool:
        head = self._format.head(self._held, at)
        if isinstance(head, Head):
            self._begin_call(head)
            return True
        if head is NEEDS_MORE and not is_last:
            return False
        self._say(at)  # not a call after all
        self._read = self._read_text
        return True

    def _begin_call(self, head: Head) -> None:
        self._events.append(CallBegun(head.name))
        self._has_calls = True
        self._held = self._held[head.end :]
        self._scanner = ValueScanner()
        self._read = self._read_arguments

    def _read_arguments(self, is_last: bool) -> bool:
        end = self._scanner.end_in(self._held)
        size = len(self._held) if end is None else end
        if size:
            self._events.append(Arguments(self._held[:size]))
        self._held = self._held[size:]
        if end is not None:
            self._read = self._read_tail
        return end is not None

    def _read_tail(self, is_last: bool) -> bool:
        tail = self._format.tail(self._held, is_last=is_last)
        if isinstance(tail, Undecided):
            if tail is FAILED or is_last:
                self._read = self._read_text
            return tail is FAILED or is_last
        self._held = self._held[tail.end :]
        self._read = self._read_start if tail.goes_on else self._read_text
        return True

    def _say(self, num_chars: int) -> None:
        """Report held text as content; whitespace at its end waits for what follows."""
        text, self._held = self._blanks + self._held[:num_chars], self._held[num_chars:]
        said = text.rstrip()
        self._blanks = text[len(said) :]
        if said:
            self._events.append(Content(said))


class NamedReader:
    """Reads an output that is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> Sequence[Event]:
        if not text:
            return ()
        begin = () if self._has_begun else (CallBegun(self._name),)
        self._has_begun = True
        return (*begin, Arguments(text))

    def finish(self) -> Sequence[Event]:
        return ()


class ContentReader:
    """Reads an output that is all content."""

    def feed(self, text: str) -> Sequence[Event]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Event]:
        return ()
