"""Parses content and tool calls out of an output as it streams.

A call is reported once its name is known, its arguments as they come. Nothing reported is taken
back, so a call that is cut off keeps its part. All other text is content, in order. The result does
not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from .arguments import ArgumentsReader, JsonArguments
from .matching import FAILED, NEEDS_MORE, Undecided, overlap, pieces
from .tool_format import Head, TaughtFormat, ToolFormat


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the function `name`. `id`: as the model wrote it, None where it writes none."""

    name: str
    id: str | None = None


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

    def __init__(
        self,
        tool_format: ToolFormat,
        schemas: Mapping[str, object] | None = None,
        *,
        wrapping: TaughtFormat | None = None,
        may_call: bool = True,
    ) -> None:
        """`schemas`: of functions' arguments; `wrapping`: whose marks around answers are left out;
        `may_call`: else all text is content."""
        self._format = tool_format
        self._schemas = schemas or {}
        self._wrappings = () if wrapping is None else tuple(wrapping.wrappings)
        self._opening = "" if wrapping is None else wrapping.opening
        self._triggers = (*self._wrappings, *(tool_format.triggers if may_call else ()))
        self._begins_at_start = tool_format.begins_at_start and may_call
        self._held = ""
        self._blanks: list[str] = []
        self._has_calls = False
        self._ids = set[str]()
        self._arguments: ArgumentsReader = JsonArguments()
        self._events: list[Event] = []
        self._read = self._read_opening

    def leave_out(self, mark: str) -> None:
        """From now on this mark is no content."""
        if mark not in self._wrappings:
            self._wrappings = (*self._wrappings, mark)
            self._triggers = (mark, *self._triggers)

    def feed(self, text: str) -> Sequence[Event]:
        events: list[Event] = []
        for piece in pieces(text):
            self._held += piece
            events += self._run(is_last=False)
        return events

    def finish(self) -> Sequence[Event]:
        events = [*self._run(is_last=True)]
        blanks = "".join(self._blanks)
        if blanks and not self._has_calls:
            events.append(Content(blanks))
        return events

    def _run(self, *, is_last: bool) -> Sequence[Event]:
        """Each state reads a part of the held text, until one needs more."""
        while self._held and self._read(is_last):
            pass
        events, self._events = self._events, []
        return events

    def _read_opening(self, is_last: bool) -> bool:
        """What begins an answer that is no call; only at the very beginning."""
        text = self._held.lstrip()
        if self._opening and text.startswith(self._opening):
            self._held = text[len(self._opening) :]
            self._read = self._read_text
            return True
        if self._opening and self._opening.startswith(text) and not is_last:
            return False
        self._read = self._read_start if self._begins_at_start else self._read_text
        return True

    def _read_start(self, is_last: bool) -> bool:
        """Whether a call begins here without a trigger."""
        return self._read_head_at(0, is_last)

    def _read_text(self, is_last: bool) -> bool:
        begins = [(at, t) for t in self._triggers if (at := self._held.find(t)) >= 0]
        if begins:
            begin, self._trigger = min(begins)
            self._say(begin)
            self._read = self._read_head
            return True
        num_kept = 0 if is_last else self._num_undecided()
        self._say(len(self._held) - num_kept)
        return False

    def _num_undecided(self) -> int:
        """Characters at the end that may be the beginning of a trigger."""
        return max((overlap(self._held, trigger) for trigger in self._triggers), default=0)

    def _read_head(self, is_last: bool) -> bool:
        """A mark around an answer, or the head of a call."""
        for mark in self._wrappings:
            if self._held.startswith(mark):
                self._held = self._held[len(mark) :]
                self._read = self._read_text
                return True
            if mark.startswith(self._held) and not is_last:
                return False
        return self._read_head_at(len(self._trigger), is_last)

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
        call_id = None if head.id in self._ids else head.id
        if call_id is not None:
            self._ids.add(call_id)
        self._events.append(CallBegun(head.name, call_id))
        self._has_calls = True
        self._held = self._held[head.end :]
        self._arguments = self._format.arguments(head, self._schemas.get(head.name))
        self._read = self._read_arguments

    def _read_arguments(self, is_last: bool) -> bool:
        taken = self._arguments.read(self._held, is_last=is_last)
        if taken.json:
            self._events.append(Arguments(taken.json))
        self._held = self._held[taken.num_chars :]
        if taken.is_over:
            self._read = self._read_tail
        return taken.is_over

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
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        said = text.rstrip()
        if said:
            self._events.append(Content("".join((*self._blanks, said))))
            self._blanks.clear()
        self._blanks.append(text[len(said) :])


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
