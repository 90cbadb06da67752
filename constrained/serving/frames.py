"""What an engine and its grammar workers say to each other, as frames on pipes, and the stacks that
both have for grammars: llguidance's parser of grammars recurses natively, as deep as they nest.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from ..spec import GrammarSpec

# A worker has tried what an engine binds, and on the smaller stack: what does not fit ends the
# worker. 200 levels of a schema need 3 MB (measured: 300 fit into 4 MB, 150 into 2 MB).
WORKER_STACK_BYTES = 4 * 2**20
ENGINE_STACK_BYTES = 4 * WORKER_STACK_BYTES

_LENGTH = struct.Struct("<I")
_stack_size_lock = threading.Lock()


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


def named(kind: str, error: Exception) -> str:
    """An error's message, led by what it is about."""
    message = str(error)
    return message if message.startswith(kind) else f"{kind}: {message}"


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


def start_thread(run: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """A daemon whose stack is as large whatever `ulimit -s` says."""
    thread = threading.Thread(target=run, name="stemma-grammar", daemon=True)
    with _stack_size_lock:  # the size holds for all threads that start
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
