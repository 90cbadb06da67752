"""The interface of drafters: who guesses the next tokens of a request's text.

A draft never changes an output: it is verified, token by token, against what is drawn in its place
(`schedule/outputs.py`). So a drafter may guess by any means; what it says of its confidence decides
how many of its guesses are computed (`budget.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol


class Side(NamedTuple):
    """A guess in place of another. It follows token `behind` of a draft, numbered over the draft's
    tokens and then over its sides, or, at -1, the text. `confidence`: as of a draft's token."""

    behind: int
    token_id: int
    confidence: float
    cell: int = 0  # for its drafter: what the confidence rests on


class Draft(NamedTuple):
    """Guessed tokens; `confidences[i]`: the probability that token i is right, given that those
    before it are; in [0, 1]. With `sides` they are a tree, of which at most one path is right."""

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    source: str = ""  # for counters: the drafter, or the part of it that knew
    evidence: tuple[int, ...] = ()  # for its drafter: what each confidence rests on
    sides: tuple[Side, ...] = ()  # parents before children

    @property
    def chances(self) -> list[float]:
        """Of each token the probability that it and all before it are right."""
        return list(accumulate(self.confidences, mul))

    def first(self, num_tokens: int) -> Draft:
        """So many of its tokens, without sides."""
        return Draft(
            self.tokens[:num_tokens],
            self.confidences[:num_tokens],
            self.source,
            self.evidence[:num_tokens],
        )


NO_DRAFT = Draft()


class Subject(Protocol):
    """What a drafter sees of a request."""

    @property
    def prompt(self) -> array[int]: ...

    @property
    def prediction(self) -> array[int]:
        """What its author expects as its output; empty: nothing is known."""

    @property
    def history(self) -> Hashable:
        """Whose texts may be its drafts: those of equal histories."""

    @property
    def op_key(self) -> Hashable:
        """Which op of which function this is; None: not known."""

    @property
    def program_key(self) -> Hashable:
        """The program that made the call; None: no other call is of it."""


class DraftText(Protocol):
    """A request's text as one drafter follows it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were generated."""

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        """At most `room` tokens that may follow the text with `tail` behind it."""

    def note(self, draft: Draft, num_accepted: int) -> None:
        """A draft was verified, all of it (else `draft.first(n)`): so many of its tokens were
        right, and the one behind these, if it has one, was wrong."""

    def close(self) -> None:
        """The request has ended."""


class Drafter(Protocol):
    """Owns the texts that it follows, and what it has learnt from ended ones."""

    def open(self, subject: Subject) -> DraftText | None:
        """Follow a request's text; None: it has nothing to say of it."""
