"""The arguments of one call as they are written, read as JSON text."""

from __future__ import annotations

import json
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
    """Arguments that are JSON: told as they are written. A string that is an object's JSON is told
    as that object, and null as an empty one; these are told once they are whole."""

    def __init__(self) -> None:
        self._scanner = ValueScanner()
        self._waits: bool | None = None  # for the whole value; None: nothing of it was read
        self._num_scanned = 0  # characters of the value that waits

    def read(self, text: str, *, is_last: bool) -> Taken:
        if self._waits is None and text:
            self._waits = text[0] in '"n'
        end = self._scanner.end_in(text[self._num_scanned :])
        size, is_over = (len(text), False) if end is None else (self._num_scanned + end, True)
        if not self._waits:
            return Taken(text[:size], size, is_over)
        if is_over or is_last:
            return Taken(object_in(text[:size]), size, is_over)
        self._num_scanned = size
        return Taken("", 0)


class KnownArguments:
    """Arguments that the call's head has already."""

    def __init__(self, json_text: str) -> None:
        self._json = json_text

    def read(self, text: str, *, is_last: bool) -> Taken:
        return Taken(self._json, 0, True)


def object_in(raw: str) -> str:
    """The JSON of an object that was written as a string or as null; else the same text."""
    if raw == "null":
        return "{}"
    try:
        inner = json.loads(raw)
        is_object = isinstance(inner, str) and isinstance(json.loads(inner), dict)
    except (ValueError, RecursionError):
        return raw
    return inner if is_object else raw
