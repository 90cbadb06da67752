"""One branch of a program that is being carried out: the ops left to do, and what waits for what.

What it has so far is a transcript: token ids in the engine, text on other servers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from . import ir


class Forkable(Protocol):
    """A transcript, as a fork needs it."""

    def copy(self) -> Self:
        """An independent one with the same content."""


TranscriptT = TypeVar("TranscriptT", bound=Forkable)
CallT = TypeVar("CallT")


@dataclass(slots=True, eq=False)
class Branch(Generic[TranscriptT, CallT]):
    """Its log from the current op on, and its transcript once it has begun."""

    number: int
    path: tuple[tuple[int, int], ...] = ()  # (place of the fork, index) from the root down
    places: ir.Places = field(default_factory=ir.Places)
    log: deque[ir.Op] = field(default_factory=deque)
    num_received: int = 0
    transcript: TranscriptT | None = None  # None: not forked yet
    fork_length: int = 0  # of the transcript when it began
    call: CallT | None = None
    is_waiting: bool = False
    end_number: int | None = None  # it is ended: as the how manieth of its program
    error: str | None = None
    failed_seq: int | None = None  # of the op that failed, where the branch can go on from there
    lost: list[tuple[int, int, str]] = field(default_factory=list)  # (first, end, why) of its ops

    num_wanted: int = 0  # Vars and Joins, not done yet, that need it
    unforked: list[Self] = field(default_factory=list)  # children of Forks in the log
    joined_by: Self | None = None  # whose log has the Join of this branch
    num_awaited: int = 0  # ends of branches that its Join still needs; 0: it does not wait for any

    def seed_of(self, op: ir.Gen, seed: int, instance: int) -> int:
        """The seed of a gen that names none, from its program's and from where it stands: forks
        differ, and repeated runs do not."""
        return ir.hashed_seed(seed, instance, self.path, self.places.of(op))

    @property
    def is_ended(self) -> bool:
        """Whether nothing follows on it."""
        return self.end_number is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do with what has arrived."""
        return self.error is not None or not self.log

    def why_lost(self, seq: int) -> str | None:
        """Why this op made no value and never will; None: it may."""
        if self.error is not None:
            return self.error
        return next((why for first, end, why in self.lost if first <= seq < end), None)

    @property
    def begun(self) -> TranscriptT:
        """Its transcript, which it has once it runs."""
        assert self.transcript is not None, f"branch {self.number} runs before its fork"
        return self.transcript


BranchT = TypeVar("BranchT", bound=Branch[Any, Any])
