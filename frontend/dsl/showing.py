"""A branch as a notebook and a debugger show it: what is there so far, without waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from ..client.program import Pending
from ..client.values import Piece
from ..protocol import ir

MAX_CHARS = 200  # of a repr
MAX_HTML_CHARS = 100_000
_PENDING = "…"
_GENERATED = "background:rgba(64,144,255,.22);border-radius:3px"
_ROLE = "font-size:.75em;letter-spacing:.05em;opacity:.65;margin-top:.6em"
_BODY = "white-space:pre-wrap;overflow-wrap:anywhere;margin:0"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a branch's text; `name`: of the value that was generated as it, "" for one without
    a name, None for text; `role`: a message of it begins here."""

    text: str
    name: str | None = None
    role: str = ""


def chunks_of(pieces: Sequence[Piece]) -> list[Chunk]:
    """What the pieces have become so far."""
    chunks: list[Chunk] = []
    for piece in pieces:
        if isinstance(piece, str):
            chunks.append(Chunk(piece))
            continue
        text = piece.text if piece.is_done else _PENDING
        if isinstance(piece.op, ir.RoleBegin):
            chunks.append(Chunk("", role=piece.op.role))
        elif isinstance(piece.op, ir.Gen | ir.Select):
            value = piece.value[0] if isinstance(piece.value, list) else piece.value
            chunks.append(Chunk(str(value) if piece.is_done else _PENDING, piece.op.name))
        elif not isinstance(piece.op, ir.RoleEnd | ir.Tools):
            chunks.append(Chunk(text))
    return chunks


def repr_of(pieces: Sequence[Piece], names: Sequence[str]) -> str:
    """Its text, cut in the middle, and the names of its values."""
    text = "".join(piece if isinstance(piece, str) else _shown(piece) for piece in pieces)
    if len(text) > MAX_CHARS:
        text = f"{text[: MAX_CHARS // 2]} … {text[-MAX_CHARS // 2 :]}"
    values = f", values: {', '.join(names)}" if names else ""
    return f"<ProgramState {text!r}{values}>"


def html_of(pieces: Sequence[Piece]) -> str:
    """Its messages, or its text, with what was generated marked."""
    parts = "".join(_html(chunks_of(pieces)))
    return f'<div style="{_BODY}">{parts}</div>'


def _shown(piece: Pending) -> str:
    return piece.text if piece.is_done and not piece.replace else "" if piece.is_done else _PENDING


def _html(chunks: Sequence[Chunk]) -> Iterator[str]:
    num_left = MAX_HTML_CHARS
    for chunk in chunks:
        if chunk.role:
            yield f'<div style="{_ROLE}">{escape(chunk.role)}</div>'
        text = escape(chunk.text[:num_left])
        num_left -= len(chunk.text)
        if chunk.name is None:
            yield text
        else:
            title = escape(chunk.name or "unnamed")
            yield f'<span style="{_GENERATED}" title="{title}">{text}</span>'
        if num_left <= 0:
            yield "…"
            return
