"""The interface of a tool call format: how a model was trained to write calls into its text."""

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
    """What follows a call's arguments, up to `end`; `goes_on`: another head follows."""

    end: int
    goes_on: bool = False


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

    def tail(self, text: str, *, is_last: bool) -> Tail | Undecided:
        """The tail of the call whose arguments just ended; NEEDS_MORE only unless `is_last`."""

    def new_id(self) -> str:
        """A new call's id."""


class TaughtFormat(ToolFormat, Protocol):
    """A format that models are trained on."""

    def structures(self, name: str, schema: object) -> Sequence[dict[str, Any]]:
        """Tags for `structural_tag`: calls of this function with arguments of this schema."""

    @property
    def needs_no_grammar(self) -> bool:
        """Whether calls are left unconstrained unless schemas must be enforced: its triggers may
        also begin other text."""


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
