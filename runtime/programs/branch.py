"""One branch of a running program: the ops left to do, and what has become of the others."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from ...frontend.protocol import ir
from ..tokenizer.transcript import TextChange, Transcript
from .calls import Call
from .hints import AskedHint


@dataclass(slots=True, eq=False)
class Value:
    """What an op appended, for `Var`."""

    ids: array[int]
    text: str


@dataclass(slots=True, eq=False)
class Branch:
    """Its log from the current op on, and its transcript once it has begun."""

    number: int
    path: tuple[tuple[int, int], ...] = ()  # (place of the fork, index) from the root down
    places: ir.Places = field(default_factory=ir.Places)
    log: deque[ir.Op] = field(default_factory=deque)
    num_received: int = 0
    transcript: Transcript | None = None  # None: not forked yet
    fork_length: int = 0  # len(ids) when it began
    pending_text: list[ir.Text] = field(default_factory=list)
    asked: list[AskedHint] = field(default_factory=list)
    call: Call | None = None
    text_change: TextChange | None = None  # how the text before the call turned out to read
    is_waiting: bool = False
    end_number: int | None = None  # it is ended: as the how manieth of its program
    error: str | None = None
    namespace: Hashable | None = None  # of the last call's KV; None: no call was made yet

    num_calls: int = 0  # Gens, Selects and Embeds in the log
    num_wanted: int = 0  # Vars and Joins, not done yet, that need it
    unforked: list[Branch] = field(default_factory=list)  # children of Forks in the log
    joined_by: Branch | None = None  # whose log has the Join of this branch
    num_awaited: int = 0  # ends of branches that its Join still needs; 0: it does not wait for any

    @property
    def is_ended(self) -> bool:
        """Whether nothing follows on it."""
        return self.end_number is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do with what has arrived."""
        return self.error is not None or not self.log

    @property
    def begun(self) -> Transcript:
        """Its transcript, which it has once it runs."""
        assert self.transcript is not None, f"branch {self.number} runs before its fork"
        return self.transcript

    def num_calls_ahead(self) -> int:
        """The longest chain of calls that are known to follow each other from its current op on:
        its own, then those of a branch it will fork, or of the one that joins it."""
        forked = max((child.num_calls for child in self.unforked), default=0)
        chain = self.num_calls + forked
        step, seen = self.joined_by, {self.number}
        while step is not None and step.number not in seen:
            chain += step.num_calls
            seen.add(step.number)
            step = step.joined_by
        return chain
