"""The value that a branch binds to a name, and what must be done before it can be read.

`pendings_of` lists what to wait for, one after the other; then `value_of` and `meta_of` read
without waiting. So waiting is written only once for threads and once for coroutines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import InvalidProgram
from ..protocol.native_answer import LogprobForm
from .program import Pending

Piece: TypeAlias = str | Pending  # of a branch's text
_FORM = LogprobForm(is_wanted=True, has_text=True)


@dataclass(frozen=True, slots=True)
class Known:
    """A value that the program's author set."""

    value: object


@dataclass(frozen=True, slots=True)
class Span:
    """The text that a branch appended within a `var_scope`: its pieces from `start` on."""

    pieces: tuple[Piece, ...]  # from the branch's beginning: a chat template may rewrite it all
    start: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """The values of one name in the branches of a join; None where a branch has none."""

    join: Pending
    items: tuple[Value | None, ...]

    def counted(self) -> list[Value | None]:
        """The values of the branches that the join counted; None of those that have none."""
        indices = range(len(self.items)) if self.join.value is None else self.join.value
        return [self.items[index] for index in indices]


Value: TypeAlias = Pending | Known | Span | Gathered


def pendings_of(found: Value) -> Iterator[Pending]:
    """What must be done before `found` can be read; advance only when the last one is done."""
    if isinstance(found, Pending):
        yield found
    elif isinstance(found, Span):
        yield from (piece for piece in found.pieces if isinstance(piece, Pending))
    elif isinstance(found, Gathered):
        if getattr(found.join.op, "num_needed", None) is not None:
            yield found.join
        for item in found.counted():
            if item is not None:
                yield from pendings_of(item)


def value_of(found: Value) -> Any:
    """The value; everything in `pendings_of` is done."""
    if isinstance(found, Pending):
        return found.typed_value
    if isinstance(found, Known):
        return found.value
    if isinstance(found, Span):
        return text_of(found.pieces)[len(text_of(found.pieces[: found.start])) :]
    return [None if item is None else value_of(item) for item in found.counted()]


def meta_of(name: str, found: Value) -> Any:
    """Meta info of a value: a dict, or a list of them. Raises InvalidProgram for a value that no
    call made."""
    if isinstance(found, Gathered):
        return [None if item is None else meta_of(name, item) for item in found.counted()]
    if not isinstance(found, Pending):
        raise InvalidProgram.of("name", name, "the name of a gen or select of this branch")
    meta = found.meta
    if isinstance(meta, list):
        return [_told(item) for item in meta]
    return {**_told(meta), **found.more_meta}


def _told(meta: Mapping[str, Any]) -> dict[str, Any]:
    """With SGLang's names for log probabilities beside ours."""
    return {**meta, **_FORM.of(meta)}


def text_of(pieces: Sequence[Piece]) -> str:
    """The text of a branch from all its pieces so far, which are done."""
    text = ""
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        else:
            text = piece.text if piece.replace else text + piece.text
    return text
