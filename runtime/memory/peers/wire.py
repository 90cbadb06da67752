"""What two engines say of a prompt's KV: frames over ZeroMQ, and who may say what.

    receiver (DEALER)                            sender (ROUTER)
    ping   layout                          ->
                                           <-    pong   epoch, layout, queue, cost of a token
    ask    stream, namespace, [start, end),->
           layout; token ids; memory
                                           <-    kv     stream, piece, tokens; their bytes, where
                                                        they were not written into that memory
                                           <-    proved stream, end: all before it is right
                                           <-    done   stream, or why there is no more
    cancel stream                          ->

A piece is one layer's part of the KV (kv_layout.py): part after part, layer after layer, as in a
block's payload. All that a sender says of a stream bears its epoch, another one for each start of
the process, and a running number: late words of a process that is gone are found out, and so is a
message that was lost. A layout (block_key.py) stands for the model's revision, arithmetic, heads
and layers; page sizes may differ, since what travels is tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

PING_S = 0.25
SILENCE_S = 3.0  # without a word the other side counts as gone (guess)
MAX_PIECE_BYTES = 4 * 2**20  # of one message


class MalformedMessage(ValueError):
    """A peer's frames are none of these."""


class StreamKey(NamedTuple):
    """A stream of one peer, at its sender."""

    peer: bytes
    number: int


@dataclass(frozen=True, slots=True)
class Ping:
    """A receiver is there."""

    kind: ClassVar[bytes] = b"ping"
    layout: str  # in hexadecimal, BlockLayout.digest


@dataclass(frozen=True, slots=True)
class Pong:
    """A sender is there, and what a prompt would wait for."""

    kind: ClassVar[bytes] = b"pong"
    epoch: str
    layout: str
    accepts: bool  # its role lets it compute for others
    queue_s: float  # until a new prompt would begin
    prompt_token_s: float  # 0: not known yet


@dataclass(frozen=True, slots=True)
class Ask:
    """Compute a prompt, and send its KV from token `start` on. With its token ids, int32."""

    kind: ClassVar[bytes] = b"ask"
    stream: int
    layout: str
    namespace: str
    start: int
    offer: str | None = None  # of memory to write the pieces into (written_memory.py)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for a stream any more."""

    kind: ClassVar[bytes] = b"cancel"
    stream: int


@dataclass(frozen=True, slots=True)
class Piece:
    """KV of the tokens [start, start + length); with its bytes,
    [num_vectors, length, vector_bytes], or with none: they are in the memory that was offered."""

    kind: ClassVar[bytes] = b"kv"
    epoch: str
    stream: int
    number: int  # of this stream's messages
    piece: int
    start: int
    length: int
    sent_s: float  # time.time()


@dataclass(frozen=True, slots=True)
class Proved:
    """The step that computed the tokens before `end` has succeeded."""

    kind: ClassVar[bytes] = b"proved"
    epoch: str
    stream: int
    number: int
    end: int


@dataclass(frozen=True, slots=True)
class Done:
    """No more comes of a stream."""

    kind: ClassVar[bytes] = b"done"
    epoch: str
    stream: int
    number: int
    error: str | None  # why it is not whole


OfStream = Piece | Proved | Done
Message = Ping | Pong | Ask | Cancel | OfStream
_KINDS = {each.kind: each for each in (Ping, Pong, Ask, Cancel, Piece, Proved, Done)}
_CHECKS = {
    "str": lambda value: _is_text(value),
    "str | None": lambda value: value is None or _is_text(value),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and 0 <= value < 1 << 62,
    "float": lambda value: isinstance(value, int | float) and 0 <= value < 1e12,
}


def frames_of(message: Message, data: Any = None) -> list[Any]:
    """Its frames; `data`: a buffer to follow."""
    frames = [message.kind, json.dumps(asdict(message)).encode()]
    return frames if data is None else [*frames, data]


def message_of(frames: Sequence[Any]) -> tuple[Message, memoryview]:
    """The message, and the buffer that follows, which may be empty. Raises MalformedMessage."""
    try:
        kind = _KINDS[bytes(frames[0])]
        fields = json.loads(bytes(frames[1]))
        data = memoryview(frames[2]) if len(frames) > 2 else memoryview(b"")
        known = {name: field.type for name, field in kind.__dataclass_fields__.items()
                 if name != "kind"}  # fmt: skip
        if not isinstance(fields, dict) or set(fields) != set(known):
            raise ValueError("other fields")
        for name, value in fields.items():
            if not _CHECKS[str(known[name])](value):
                raise ValueError(f"{name}={value!r:.100}")
        return kind(**fields), data
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise MalformedMessage(f"no message between engines: {error}") from error


def _is_text(value: object) -> bool:
    """Whether it is a string that can be written in UTF-8: half a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)
