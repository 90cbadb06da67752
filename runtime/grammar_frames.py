"""What an engine and its grammar workers say to each other, as frames on pipes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import IO

from ..constrained.spec import GrammarSpec

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Job:
    """A grammar to compile within `limit_s` seconds of wall time."""

    spec: GrammarSpec
    limit_s: float


@dataclass(frozen=True, slots=True)
class Check:
    """A text to validate against a JSON Schema, both as text, within `limit_s` seconds."""

    schema: str
    text: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why it cannot be compiled; `kind` names the class of the error."""

    message: str
    kind: str


def write_frame(stream: IO[bytes], payload: bytes) -> None:
    """A length, then so many bytes."""
    stream.write(_LENGTH.pack(len(payload)) + payload)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None at the stream's end."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    payload = stream.read(length)
    return payload if len(payload) == length else None
