"""The wire protocol between a client and a runtime: messages, framing, limits.

One protocol for all distances (ipc, tcp, inproc). A message is multipart: an orjson header
`{"v": 2, "op": ..., ...}` followed by raw buffers. DEALER on the client's side, ROUTER on the
runtime's. docs/how-it-works/protocol.md lists every message; in short:

    client -> runtime   hello, ops, intern, cancel, call    credit, ping, bye
    runtime -> client   events, reply, cache                welcome, credit, pong, error

The first group of each is numbered (`n`) and kept until the other side has acknowledged it, so that
a session outlives its connection (see `link`); the others are not. An event is
`[program, branch, seq, kind, payload]`.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ...errors import InvalidProgram, ProtocolError

VERSION = 2
PEER_HEARTBEAT_MS = 2_000  # ZeroMQ's own; its I/O thread responds however busy the peer is
PEER_TIMEOUT_MS = 10_000
DRAIN_ORDER = b"drain\n"  # to an engine's standard input: accept no new programs
HEARTBEAT_S = 2.0  # a silent client sends ping this often
GRACE_S = 20.0  # how long a vanished client may take to come back (guess: 10 beats)
RUNTIME_TIMEOUT_S = 120.0  # silence of a connected runtime: a step may be long (guess)
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_CREATE_BYTES = 1024 * 1024  # a program's header, e.g. its tools
MAX_OP_BYTES = MAX_FRAME_BYTES - 2 * MAX_CREATE_BYTES  # so that both fit in a message
MAX_BUFFERS = 16
MAX_BRACKETS = 1_500_000  # "[" and "{" in a header: bounds the objects made of it
MAX_OP_BRACKETS = 1_000_000  # the same for one op; more than all that share a message can have
LARGE_BYTES = 256 * 1024

# Flow control: numbered bytes that may be in flight and unacknowledged (guesses: several times
# what a connection of 1 Gbit/s and 50 ms holds). One message larger than that travels alone.
CLIENT_CREDIT_BYTES = 32 * 1024 * 1024
RUNTIME_CREDIT_BYTES = 8 * 1024 * 1024
ACK_AFTER_BYTES = 512 * 1024  # received messages are acknowledged at the latest after this much

MAX_TENANT_CHARS = 256

CLIENT_OPS = frozenset({"hello", "ops", "intern", "cancel", "call", "credit", "ping", "bye"})
RUNTIME_OPS = frozenset({"welcome", "events", "reply", "cache", "credit", "pong", "error"})
NUMBERED_OPS = frozenset({"ops", "intern", "cancel", "call", "events", "reply", "cache"})

# Kinds of events.
DELTA = "delta"  # payload: text appended by a streaming gen, or `text_of_delta`'s object
VALUE = "value"  # payload: {"value", "text", "meta"}: the op is done
MARK = "mark"  # payload: {"text", "replace"}: what a role or token ids appended to the text
# payload: {"text", "chance"}: what a gen, or the next one of its op, probably will say: `foretell`
LIKELY = "likely"
FAILED = "failed"  # payload: {"message", "kind", "op", "source", "field"?}: the branch stops here
STOPPED = "Stopped"  # kind of a failure without an error: no one waits for the branch
# The program has ended, also by being cancelled (branch and seq are 0); payload: {"num_requests",
# "prompt_tokens", "completion_tokens"}, what its requests have had, however they ended.
DONE = "done"


def text_of_delta(delta: str | dict[str, Any]) -> str:
    """The text of a delta. For a gen with logprobs, or a program with token ids, a delta is an
    object: {"text", "logprobs", "token_ids"}, and with ids the first one has "id", "prompt_tokens"
    and "cached_tokens". A token comes with the delta that completes its text."""
    return delta if isinstance(delta, str) else str(delta["text"])


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message: its `op`, the rest of the header, and the raw buffers."""

    op: str
    header: dict[str, Any]
    buffers: tuple[bytes, ...] = field(default=())
    num_bytes: int = 0  # of the whole message, as it came


def encode(op: str, buffers: Sequence[bytes] = (), **header: object) -> list[bytes]:
    """The parts of one message. Raises ProtocolError if it is larger than the limits."""
    try:
        head = orjson.dumps({"v": VERSION, "op": op, **header})
    except TypeError as error:  # e.g. a lone surrogate in a string
        raise ProtocolError(f"{op}: cannot be encoded as JSON: {error}") from error
    parts = [head, *buffers]
    _check_size(parts)
    return parts


def encode_list(op: str, name: str, items: Sequence[bytes], **header: int) -> list[bytes]:
    """A message whose field `name` is a list of already encoded items.

    Raises ProtocolError if it is larger than the limits.
    """
    fields = "".join(f',"{key}":{value}' for key, value in header.items())
    head = f'{{"v":{VERSION},"op":"{op}"{fields},"{name}":['.encode()
    parts = [b"".join((head, b",".join(items), b"]}"))]
    _check_size(parts)
    return parts


def encode_op(op: Sequence[object]) -> bytes:
    """One op of a program as an item of `encode_program`. Raises InvalidProgram."""
    return encode_part(op[0], op)


def encode_part(kind: object, part: object) -> bytes:
    """An op of this kind, or what is sent ahead of it. Raises InvalidProgram if it cannot be sent:
    it is no JSON, or larger than a message may be."""
    try:
        encoded = orjson.dumps(part)
    except TypeError as error:
        raise InvalidProgram(f"{kind}: cannot be sent: {error}") from error
    if len(encoded) > MAX_OP_BYTES:
        raise InvalidProgram(f"{kind}: {len(encoded)} bytes; at most {MAX_OP_BYTES} can be sent")
    if len(encoded) > LARGE_BYTES and _num_brackets(encoded) > MAX_OP_BRACKETS:
        raise InvalidProgram(f"{kind}: more than {MAX_OP_BRACKETS} brackets cannot be sent")
    return encoded


def encode_create(create: dict[str, object]) -> bytes:
    """A program's header. Raises InvalidProgram if it is not JSON or too large."""
    try:
        encoded = orjson.dumps(create)
    except TypeError as error:
        raise InvalidProgram(f"the program's options cannot be sent: {error}") from error
    if len(encoded) > MAX_CREATE_BYTES:
        raise InvalidProgram(
            f"the program's options (its tools) have {len(encoded)} bytes; at most "
            f"{MAX_CREATE_BYTES} can be sent"
        )
    return encoded


def encode_program(
    program: int,
    ops: Sequence[bytes],
    create: bytes | None,
    *,
    end: bool,
    given: bytes | None = None,
) -> bytes:
    """An item of an `ops` message: the next, already encoded, ops of one program; `given`: what
    some of them have become elsewhere."""
    begin = b"" if create is None else b'"create":%b,' % create
    begin += b"" if given is None else b'"given":%b,' % given
    last = b',"end":true' if end else b""
    return b'{"program":%d,%b"ops":[%b]%b}' % (program, begin, b",".join(ops), last)


def decode(parts: Sequence[bytes], known_ops: frozenset[str]) -> Message:
    """Decode and check a message. Raises ProtocolError; never anything else."""
    if not parts:
        raise ProtocolError("an empty message")
    _check_size(parts)
    num_brackets = _num_brackets(parts[0])
    if num_brackets > MAX_BRACKETS:
        raise ProtocolError(f"a header with {num_brackets} brackets; at most {MAX_BRACKETS}")
    try:
        header = _loads(parts[0])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ProtocolError(f"the header is a {type(header).__name__}, not an object")
    if header.get("v") != VERSION:
        raise ProtocolError(f"protocol version {header.get('v')!r}; this side speaks {VERSION}")
    op = header.get("op")
    if not isinstance(op, str) or op not in known_ops:
        raise ProtocolError(f"unknown op {op!r}; known: {sorted(known_ops)}")
    return Message(op, header, tuple(parts[1:]), sum(len(part) for part in parts))


def _num_brackets(encoded: bytes) -> int:
    return encoded.count(b"[") + encoded.count(b"{")


def _loads(encoded: bytes) -> Any:
    """Without garbage collections in between: each would walk all objects made so far."""
    if len(encoded) < LARGE_BYTES or not gc.isenabled():
        return orjson.loads(encoded)
    gc.disable()
    try:
        return orjson.loads(encoded)
    finally:
        gc.enable()


def _check_size(parts: Sequence[bytes]) -> None:
    if len(parts) > 1 + MAX_BUFFERS:
        raise ProtocolError(f"{len(parts)} parts; at most {1 + MAX_BUFFERS}")
    largest = max(len(part) for part in parts)
    if largest > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {largest} bytes; at most {MAX_FRAME_BYTES}")
