"""What an op has become, for a program that goes on elsewhere: on another engine, or a new one.

    a value event of a replayable program   {..., "kept": {"ids", "text", "tail"?}}
    the same given to another engine        [branch, seq, {"ids", "text", "tail"?}]
    of a gen that had begun                 [branch, seq, {"begun"}]: ids
    of a join that needed some              [branch, seq, {"winners"}]
    of a branch that failed there           [branch, seq, {"failed": {"message", "kind"}}]

Ids and not text: nothing is tokenized again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidProgram

_ALLOWED = "[branch, seq, {ids, text, tail?}, {begun}, {winners} or {failed}] each"


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a call the ids and the text that it appended, with what survived a stop string as `tail`;
    of one that had only begun its first ids; of a join the indices of the branches that counted."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    text: str = ""
    tail: str = ""
    winners: Sequence[int] | None = None
    is_whole: bool = True  # else the call is to be made
    failed: tuple[str, str] | None = None  # message and kind: the branch stops at this op

    def to_wire(self) -> dict[str, Any]:
        """As a value event has it."""
        tail = {"tail": self.tail} if self.tail else {}
        return {"ids": self.ids.tolist(), "text": self.text, **tail}


NOTHING_KEPT = Kept(is_whole=False)


def given_of(items: object, vocab_size: int) -> dict[tuple[int, int], Kept]:
    """What a client gives, by branch and seq. Raises InvalidProgram."""
    if not isinstance(items, list):
        raise InvalidProgram.of("given", items, _ALLOWED)
    return dict(_read(item, vocab_size) for item in items)


def _read(item: Any, vocab_size: int) -> tuple[tuple[int, int], Kept]:
    kept: Any
    try:
        branch, seq, kept = item
        is_whole = "begun" not in kept
        ids = array("i", kept.get("ids" if is_whole else "begun", ()))
        text, tail = kept.get("text", ""), kept.get("tail", "")
        winners, failed = kept.get("winners"), kept.get("failed")
        is_fine = (
            all(isinstance(value, int) for value in (branch, seq, *(winners or ())))
            and isinstance(text, str)
            and isinstance(tail, str)
            and text.endswith(tail)
            and all(0 <= token_id < vocab_size for token_id in ids)
        )
        failure = None if failed is None else (str(failed["message"]), str(failed["kind"]))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        is_fine = False
    if not is_fine:
        raise InvalidProgram.of("given", item, _ALLOWED)
    return (branch, seq), Kept(ids, text, tail, winners, is_whole, failure)
