"""Bounds on what a JSON text may decode to, found before anything is made of it.

A value costs up to a hundred times its text: `[],` is 3 bytes, and a list of 56. The decoder is C
and lets no other thread run while it makes what has no hook (texts and lists), so their bounds are
also what an event loop beside it waits for at most. The scan takes about 2 ms a MB, by slices, and
reads what lies outside of texts exactly, up to the first error of the text.
"""

from __future__ import annotations

from collections.abc import Iterator

from .failures import Refusal

MAX_NESTING = 512  # of lists and objects; half of what the decoder itself can do
MAX_VALUES = 1 << 20  # of every kind: more token ids than most contexts hold
MAX_TEXTS = 1 << 18  # names of fields, too; decoded in 15 ms (one core of a Xeon, 2026)
MAX_CONTAINERS = 1 << 15  # lists and objects; decoded in 10 ms, made models of in 25 ms
_SLICE_BYTES = 1 << 16
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def require_bounded(body: bytes) -> None:
    """Raises Refusal for a text that would be too deep, or too many values."""
    num_values = num_quotes = num_containers = depth = 0
    for piece in _without_escapes(body):
        parts = piece.split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        brackets = outside.translate(None, _NOT_BRACKETS)
        depth = _depth_after(depth, brackets)
        num_containers += brackets.count(b"[") + brackets.count(b"{")
        num_values += outside.count(b",")
        _require("values", num_values + num_containers, MAX_VALUES)
        _require("texts", num_quotes // 2, MAX_TEXTS)
        _require("lists and objects", num_containers, MAX_CONTAINERS)


def _without_escapes(body: bytes) -> Iterator[bytes]:
    """The body in slices, without its escaped quotes and backslashes."""
    start = 0
    while start < len(body):
        end = start + _SLICE_BYTES
        piece = body[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the slice parts an escape
            end += 1
            piece = body[start:end]
        yield piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        start = end


def _depth_after(depth: int, brackets: bytes) -> int:
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_NESTING:
            raise Refusal(
                400,
                f"the body is no valid JSON here: more than {MAX_NESTING} levels deep",
                code="invalid_json",
            )
    return depth


def _require(what: str, num: int, most: int) -> None:
    if num > most:
        raise Refusal(413, f"a body may have at most {most} {what}; send several requests")
