"""The wire protocol between a client and a runtime: messages, framing, limits.

One protocol for all distances (ipc, tcp on loopback, inproc). A message is multipart: an orjson
header `{"v": 1, "op": ..., ...}` and raw buffers behind it. DEALER on the client's side, ROUTER on
the runtime's. docs/protocol.md lists every message; in short:

    client -> runtime   hello, ops, cancel, call, ping
    runtime -> client   welcome, events, reply, pong, error

An event is `[program, branch, seq, kind, payload]`. Credits, reconnect by session token and CURVE
come later: `welcome` already carries `session`, every `ops` message a `first` counter to resume by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..errors import InvalidProgram, ProtocolError

VERSION = 1
HEARTBEAT_S = 2.0  # a silent side sends ping (client) this often
PEER_TIMEOUT_S = 20.0  # silence after which a client is taken for gone (guess: 10 beats)
RUNTIME_TIMEOUT_S = 120.0  # the same of a runtime, which is silent during a step (guess)
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_OP_BYTES = MAX_FRAME_BYTES - 64 * 1024  # the rest is the header's
MAX_BUFFERS = 16

CLIENT_OPS = frozenset({"hello", "ops", "cancel", "call", "ping"})
RUNTIME_OPS = frozenset({"welcome", "events", "reply", "pong", "error"})

# Kinds of events.
DELTA = "delta"  # payload: str, text appended by a streaming gen
VALUE = "value"  # payload: {"value", "text", "meta"}: the op is done
MARK = "mark"  # payload: {"text", "replace"}: what a role or token ids appended to the text
FAILED = "failed"  # payload: {"message", "kind", "op", "source"}: the branch stops here
DONE = "done"  # the program has ended (branch and seq are 0)


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message: its `op`, the rest of the header, and the raw buffers."""

    op: str
    header: dict[str, Any]
    buffers: tuple[bytes, ...] = field(default=())


def encode(op: str, buffers: Sequence[bytes] = (), **header: object) -> list[bytes]:
    """The parts of one message. Raises ProtocolError if it is larger than the limits."""
    try:
        head = orjson.dumps({"v": VERSION, "op": op, **header})
    except TypeError as error:  # e.g. a lone surrogate in a string
        raise ProtocolError(f"{op}: cannot be encoded as JSON: {error}") from error
    parts = [head, *buffers]
    _check_size(parts)
    return parts


def encode_op(op: Sequence[object]) -> bytes:
    """One op of a program, to travel within a message as `embedded(...)`.

    Raises InvalidProgram if it cannot: it is no JSON, or larger than a message may be.
    """
    try:
        encoded = orjson.dumps(op)
    except TypeError as error:
        raise InvalidProgram(f"{op[0]}: cannot be sent: {error}") from error
    if len(encoded) > MAX_OP_BYTES:
        raise InvalidProgram(f"{op[0]}: {len(encoded)} bytes; at most {MAX_OP_BYTES} can be sent")
    return encoded


def embedded(encoded: bytes) -> object:
    """What `encode` takes for a value that is encoded already."""
    return orjson.Fragment(encoded)


def decode(parts: Sequence[bytes], known_ops: frozenset[str]) -> Message:
    """Decode and check a message. Raises ProtocolError; never anything else."""
    if not parts:
        raise ProtocolError("an empty message")
    _check_size(parts)
    try:
        header = orjson.loads(parts[0])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"the header is a {type(header).__name__}, not an object")
    if header.get("v") != VERSION:
        raise ProtocolError(f"protocol version {header.get('v')!r}; this side speaks {VERSION}")
    op = header.get("op")
    if not isinstance(op, str) or op not in known_ops:
        raise ProtocolError(f"unknown op {op!r}; known: {sorted(known_ops)}")
    return Message(op, header, tuple(parts[1:]))


def _check_size(parts: Sequence[bytes]) -> None:
    if len(parts) > 1 + MAX_BUFFERS:
        raise ProtocolError(f"{len(parts)} parts; at most {1 + MAX_BUFFERS}")
    largest = max(len(part) for part in parts)
    if largest > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {largest} bytes; at most {MAX_FRAME_BYTES}")
