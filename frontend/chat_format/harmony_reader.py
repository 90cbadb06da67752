"""Parses an output in the harmony format as it streams: reasoning, content and calls.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.
    |---------- header ----------|body|-gap-|----------------- header -------------------|body

What is read does not depend on how the text was cut. An output that begins with no header goes on
with a message, and is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence

from .call_reader import Arguments, CallBegun, Content, Event, Reasoning
from .matching import ValueScanner, overlap

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
MARKS = (START, END, MESSAGE, CHANNEL, CONSTRAIN)
"""The special tokens that text is decoded with."""
FINAL_TOKENS = ("<|return|>", "<|call|>")
"""Those that end an output."""
_ENDS = (END, *FINAL_TOKENS)
# Where a message lacks its end, the next one's header ends it.
_BODY_ENDS = (*_ENDS, START, CHANNEL)
_HEADS = (CHANNEL, START, MESSAGE, " to=")
_MAX_HEADER_CHARS = 1024  # guess: a name has 64; a longer one is no header
_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_BETWEEN = "\n\n"  # messages of one kind


class HarmonyReader:
    """Reads one output. `may_call`: messages to functions are calls, else content; `functions`: the
    names that are functions' without their namespace, too, which models forget in long chats."""

    def __init__(self, *, may_call: bool, functions: Container[str] = ()) -> None:
        self._may_call = may_call
        self._functions = functions
        self._held = ""
        self._events: list[Event] = []
        self._read: Callable[[bool], bool] = self._read_start
        self._told: Callable[[str], Event] = Content
        self._begun: set[Callable[[str], Event]] = set()  # kinds of messages that had text
        self._scanner = ValueScanner()
        self._is_first = True  # nothing of this message was told yet
        self.has_reasoning = False
        self.has_ended = True  # the reasoning, if any, is over

    def feed(self, text: str) -> Sequence[Event]:
        """The events of fresh text."""
        self._held += text
        return self._run(is_last=False)

    def finish(self) -> Sequence[Event]:
        """The events of held text, when no more comes. A header that was cut off says nothing."""
        return self._run(is_last=True)

    def _run(self, *, is_last: bool) -> Sequence[Event]:
        while self._held and self._read(is_last):
            pass
        events, self._events = self._events, []
        return events

    def _read_start(self, is_last: bool) -> bool:
        """Whether the output begins with a header."""
        if self._held.startswith(_HEADS):
            self._read = self._read_header
        elif is_last or not any(head.startswith(self._held) for head in _HEADS):
            self._open(Content)
        else:
            return False
        return True

    def _read_header(self, is_last: bool) -> bool:
        most = _MAX_HEADER_CHARS + len(MESSAGE)
        end = self._held.find(MESSAGE, 0, most)
        if end < 0:
            if len(self._held) >= most:
                self._open(Content)
                self._say(1)  # so that the mark at its beginning is none
                return True
            if is_last:
                self._held = ""
            return False
        header, self._held = self._held[:end], self._held[end + len(MESSAGE) :]
        self._open_message(header)
        return True

    def _open_message(self, header: str) -> None:
        channel, to = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        recipient = to[1] if to else ""
        name = recipient.removeprefix(_FUNCTIONS)
        is_function = bool(name) and (name != recipient or name in self._functions)
        if self._may_call and is_function:
            self._events.append(CallBegun(name))
            self._read = self._read_call
        elif channel is not None and channel[1] == "analysis":
            self.has_reasoning, self.has_ended = True, False
            self._open(Reasoning)
        else:
            self._open(Content)

    def _open(self, told: Callable[[str], Event]) -> None:
        self._told, self._is_first, self._read = told, True, self._read_body

    def _read_call(self, is_last: bool) -> bool:
        """The beginning of a call's arguments: marks within JSON are text."""
        text = self._held.lstrip()
        if text[:1] in ("{", "["):
            self._held, self._scanner, self._read = text, ValueScanner(), self._read_json
        elif text:
            self._open(Arguments)
        return bool(text)

    def _read_json(self, is_last: bool) -> bool:
        end = self._scanner.end_in(self._held)
        size = len(self._held) if end is None else end
        self._events.append(Arguments(self._held[:size]))
        self._held = self._held[size:]
        if end is not None:
            self._read = self._read_behind_call
        return end is not None

    def _read_behind_call(self, is_last: bool) -> bool:
        """The message's end, which may be missing."""
        text = self._held.lstrip()
        for mark in _ENDS:
            if text.startswith(mark):
                self._held, self._read = text[len(mark) :], self._read_gap
                return True
        if not is_last and any(mark.startswith(text) for mark in _ENDS):
            return False
        self._read = self._read_gap
        return True

    def _read_body(self, is_last: bool) -> bool:
        ends = [(at, mark) for mark in _BODY_ENDS if (at := self._held.find(mark)) >= 0]
        if not ends:
            kept = 0 if is_last else max(overlap(self._held, mark) for mark in _BODY_ENDS)
            self._say(len(self._held) - kept)
            return False
        at, mark = min(ends)
        self._say(at)
        self.has_ended = True
        self._read = self._read_header
        if mark in _ENDS:
            self._held = self._held[len(mark) :]
            self._read = self._read_gap
        return True

    def _read_gap(self, is_last: bool) -> bool:
        """Between two messages: another header, or text without one, which is content."""
        text = self._held.lstrip()
        if text.startswith((START, CHANNEL)):
            self._held, self._read = text, self._read_header
            return True
        is_open = not text or any(head.startswith(text) for head in (START, CHANNEL))
        if is_open and not is_last:
            return False
        if not text:
            self._held = ""
            return False
        self._open(Content)
        return True

    def _say(self, num_chars: int) -> None:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        if not text:
            return
        if self._is_first and self._told in self._begun and self._told is not Arguments:
            text = _BETWEEN + text
        self._begun.add(self._told)
        self._is_first = False
        self._events.append(self._told(text))
