"""The interface of a tool call format: how a model was trained to write calls into its text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .arguments import ArgumentsReader, JsonArguments, KnownArguments
from .contents import Content
from .matching import FAILED, Undecided


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a call up to its arguments, ending at `end`. `id`: as the model wrote it;
    `is_json`: its arguments are JSON, whatever the format's are else; `arguments`: the JSON of
    those that stand before `end`."""

    name: str
    end: int
    id: str | None = None
    is_json: bool = False
    arguments: str | None = None


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows a call's arguments, up to `end`; `goes_on`: another head follows."""

    end: int
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that may be called; `schema`: of its arguments."""

    name: str
    schema: object


class ToolFormat(Protocol):
    """How calls are written in a text. All methods may be called again with more text."""

    @property
    def triggers(self) -> Sequence[str]:
        """Texts that begin a call, wherever they occur."""

    @property
    def begins_at_start(self) -> bool:
        """Whether a text may begin with a call's head, without a trigger."""

    def head(self, text: str, at: int) -> Head | Undecided:
        """The head of the call that begins at `at`, after its trigger if it has one."""

    def arguments(self, head: Head, schema: object) -> ArgumentsReader:
        """What reads the arguments behind this head; `schema`: theirs, None where not known."""

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        """The tail of the call whose arguments just ended; NEEDS_MORE only unless `is_last`."""

    def new_id(self) -> str:
        """A new call's id."""


class TaughtFormat(ToolFormat, Protocol):
    """A format that models are trained on."""

    def known_id(self, call_id: str) -> str:
        """A call's id of any client's as the format's templates take it; equal for equal ones."""

    @property
    def wrappings(self) -> Sequence[str]:
        """Texts around answers that are not of them, wherever they occur."""

    @property
    def opening(self) -> str:
        """A text with which an answer that is no call begins, and that is not of it; "": none."""

    @property
    def grammar_triggers(self) -> Sequence[str]:
        """Texts that begin a call under a grammar; empty: calls by choice have no grammar."""

    @property
    def needs_no_grammar(self) -> bool:
        """Whether calls are left unconstrained unless schemas must be enforced: its triggers may
        also begin other text."""

    @property
    def is_forced_as_json(self) -> bool:
        """Whether a forced call is a plain JSON object, and not what `forced` says."""

    def tags(self, functions: Sequence[OfferedFunction], *, is_parallel: bool) -> Sequence[Content]:
        """What may follow the triggers: calls of these functions, several where `is_parallel`."""

    def forced(self, functions: Sequence[OfferedFunction]) -> Content:
        """A whole output that is one call of one of these functions."""


class MarkedCalls:
    """What of a `TaughtFormat` is the same in most: calls stand behind marks, with arguments in
    JSON, and around answers there are no marks."""

    __slots__ = ()

    wrappings: Sequence[str] = ()
    begins_at_start: bool = False
    opening: str = ""
    is_forced_as_json: bool = False

    @property
    def needs_no_grammar(self) -> bool:
        return False

    def arguments(self, head: Head, schema: object) -> ArgumentsReader:
        return JsonArguments() if head.arguments is None else KnownArguments(head.arguments)

    def new_id(self) -> str:
        return long_id()

    def known_id(self, call_id: str) -> str:
        return call_id


def long_id() -> str:
    """An id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


def first_end(ends: Sequence[int | Undecided], *, is_last: bool, text: str) -> int | Undecided:
    """The first match, unless an earlier one is still possible. At a text's end, a partial match is
    final."""
    for end in ends:
        if isinstance(end, int):
            return end
        if end is not FAILED:
            return len(text) if is_last else end
    return FAILED
