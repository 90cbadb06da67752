"""What a format of tool calls is: how a model was taught to write them into its text."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .matching import FAILED, Undecided


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a call up to its arguments, ending at `end`."""

    name: str
    end: int


@dataclass(frozen=True, slots=True)
class Tail:
    """What stands behind a call's arguments, up to `end`; `goes_on`: another head follows."""

    end: int
    goes_on: bool = False


class ToolFormat(Protocol):
    """How calls stand in a text. All methods may be asked again with more text at hand."""

    @property
    def triggers(self) -> Sequence[str]:
        """Texts that begin a call, wherever they come."""

    @property
    def begins_at_start(self) -> bool:
        """Whether a text may begin with a call's head, without a trigger."""

    def head(self, text: str, at: int) -> Head | Undecided:
        """Of the call that begins at `at`, behind its trigger if it has one."""

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        """Of the call whose arguments have just ended; NEEDS_MORE only unless `is_last`."""

    def new_id(self) -> str:
        """For a call."""


class TaughtFormat(ToolFormat, Protocol):
    """A format that models are taught."""

    def structures(self, name: str, schema: object) -> Sequence[dict[str, Any]]:
        """Tags for `structural_tag`: calls of this function with arguments of this schema."""

    @property
    def needs_no_grammar(self) -> bool:
        """Whether calls are left to the model, unless schemas must be enforced: its triggers may
        be the beginning of other text, too."""


def long_id() -> str:
    """As OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def first_end(ends: Sequence[int | Undecided], *, is_last: bool, text: str) -> int | Undecided:
    """The first match, unless one before it may still come. At a text's end a half match is all
    that was left of it."""
    for end in ends:
        if isinstance(end, int):
            return end
        if end is not FAILED:
            return len(text) if is_last else end
    return FAILED
