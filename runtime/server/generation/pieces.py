"""What comes of a task, piece by piece: text, each sample's outcome, or a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GRAMMAR_KINDS = ("InvalidGrammar", "UnsupportedSchema")


@dataclass(frozen=True, slots=True)
class Piece:
    """Fresh text of a streamed sample."""

    index: int  # of the sample, counted through all prompts
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished sample: its text, and counts and times as `get_meta_info` gives them."""

    index: int
    text: str
    meta: dict[str, Any]


class GenerationFailed(Exception):
    """The runtime refused or failed; `kind` names the class of its error."""

    def __init__(self, message: str, kind: str, field: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.field = field  # of the client's request, where that is known
