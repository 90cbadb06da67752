"""The arguments of one call as they are written, read as JSON text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .matching import ValueScanner


@dataclass(frozen=True, slots=True)
class Taken:
    """What of a text was read: its JSON, how many characters it was, and whether the arguments end
    there."""

    json: str
    num_chars: int
    is_over: bool = False


class ArgumentsReader(Protocol):
    """Reads the arguments of one call. The JSON adds up to the same however the text is cut."""

    def read(self, text: str, *, is_last: bool) -> Taken:
        """Reads on; `text` begins with what was not taken before, `is_last`: no more will come."""


class JsonArguments:
    """Arguments that are JSON: told as they are written."""

    def __init__(self) -> None:
        self._scanner = ValueScanner()

    def read(self, text: str, *, is_last: bool) -> Taken:
        end = self._scanner.end_in(text)
        size = len(text) if end is None else end
        return Taken(text[:size], size, end is not None)
