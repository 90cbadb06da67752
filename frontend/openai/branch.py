"""A branch of a program that is carried out here: its log, its transcript, its call."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from ..protocol import ir
from .speculation import Draft, Slot
from .transcript import Prompt, Transcript


@dataclass(slots=True, eq=False)
class Pattern:
    """Text and gens of an assistant message whose gens have no values yet."""

    prompt: Prompt  # up to where the message begins
    terms: list[str | Slot] = field(default_factory=list)
    gens: list[ir.Gen] = field(default_factory=list)  # of the slots, in order
    draft: Draft | None = None  # the answer that served the message's earlier gens


@dataclass(slots=True, eq=False)
class Branch:
    """One branch: its log from the current op on, and its transcript once it has begun."""

    number: int
    path: tuple[tuple[int, int], ...] = ()  # (place of the fork, index) from the root down
    places: ir.Places = field(default_factory=ir.Places)
    log: deque[ir.Op] = field(default_factory=deque)
    num_received: int = 0
    transcript: Transcript | None = None  # None: not forked yet
    fork_length: int = 0  # pieces of the transcript when it began
    call: asyncio.Task[None] | None = None
    last_reply_id: str = ""  # of the last answer that it has
    draft: Draft | None = None
    pattern: Pattern | None = None
    is_flushed: bool = False  # whether the program waits for what it has sent
    is_waiting: bool = False
    is_ended: bool = False
    is_stopped: bool = False  # dropped, or not among the first of a join
    error: str | None = None

    @property
    def has_open_gens(self) -> bool:
        """Whether gens are put off."""
        return self.pattern is not None and bool(self.pattern.gens)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do with what has arrived."""
        return self.error is not None or (not self.log and not self.has_open_gens)


def transcript_of(branch: Branch) -> Transcript:
    assert branch.transcript is not None, "an op ran before its branch was forked"
    return branch.transcript


def hint_target(branch: Branch) -> dict[str, str] | None:
    """What the branch has, as a server knows it: its text; of a chat, up to its last answer."""
    transcript = transcript_of(branch)
    if transcript.is_chat:
        return {"response_id": branch.last_reply_id} if branch.last_reply_id else None
    text = "".join(piece.text for piece in transcript.pieces)
    return {"prompt": text} if text else None


def abort(branch: Branch) -> None:
    """Close the branch's call, if one is under way."""
    call, branch.call = branch.call, None
    if call is not None:
        call.cancel()


def is_whole_message(branch: Branch, pattern: Pattern) -> bool:
    """Whether the message is one gen and nothing else."""
    is_only = len(pattern.gens) == len(pattern.terms) == 1
    return is_only and bool(branch.log) and isinstance(branch.log[0], ir.RoleEnd)
