"""What may follow a request's last token, and the part of it that a step verifies.

        | a | b | f | g |        a guess's own tokens; f is forced by the grammar behind b
            | y |                beside b: behind a
        | c | d |                beside a, and one behind it

A draft model names tokens beside its own; all of them are a tree, of which one path at most is
right (`draft_tree.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ...constrained.matcher import Mask
from ..speculate.budget import Bid
from ..speculate.drafter import Draft, DraftText


@dataclass(frozen=True, slots=True, eq=False)
class SideToken:
    """A token that may follow in another's place, beside a guess's own: behind `parent`, or behind
    token `leaves_at` of these; -1: behind the text."""

    parent: SideToken | None
    leaves_at: int  # where its path leaves the guess's own
    path: tuple[int, ...]  # all tokens up to it, it included
    chance: float  # that all of these are right
    source: str
    cell: int


@dataclass(slots=True)
class Guess:
    """What may follow a request's last token. `chances[i]`: that tokens 0 to i are right;
    `is_forced[i]`: the grammar forces token i, once those before it are right."""

    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    is_forced: list[bool] = field(default_factory=list)
    # Whose guesses these are, in order, with the place of each one's first token.
    parts: list[tuple[DraftText, Draft, int]] = field(default_factory=list)
    sides: list[SideToken] = field(default_factory=list)  # parents before children

    def append(self, token_id: int, chance: float, forced: Sequence[int]) -> None:
        """One more token, and what it forces."""
        self.tokens += (token_id, *forced)
        self.chances += [chance] * (1 + len(forced))
        self.is_forced += [False, *[True] * len(forced)]

    def extend(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """More tokens, none of them forced."""
        self.tokens += tokens
        self.chances += chances
        self.is_forced += [False] * len(tokens)

    def add_sides(self, stop_ids: Collection[int]) -> None:
        """The sides of its drafts that stand behind tokens of its own, but for stop ids."""
        for _, draft, first in self.parts:
            if draft.sides:
                self._add_sides(draft, self._places(draft, first), stop_ids)

    def _places(self, draft: Draft, first: int) -> dict[int, int]:
        """The draft's tokens that are its own from `first` on, and behind which something is drawn;
        -1: what is before."""
        places = {-1: first - 1}
        for place in range(min(len(draft.tokens), len(self.tokens) - first)):
            if any(self.is_forced[first + place : first + place + 2]):
                break
            places[place] = first + place
        return places

    def _add_sides(
        self, draft: Draft, places: Mapping[int, int], stop_ids: Collection[int]
    ) -> None:
        sides: dict[int, SideToken] = {}
        for number, side in enumerate(draft.sides, len(draft.tokens)):
            parent, at = sides.get(side.behind), places.get(side.behind)
            if parent is not None:
                at, before, chance = parent.leaves_at, parent.path, parent.chance
            elif at is not None:
                before = tuple(self.tokens[: at + 1])
                chance = self.chances[at] if at >= 0 else 1.0
            if at is not None and side.token_id not in stop_ids:
                path, chance = (*before, side.token_id), chance * side.confidence
                sides[number] = SideToken(parent, at, path, chance, draft.source, side.cell)
        self.sides += sides.values()

    def bid(self, least: float, weight: float) -> Bid:
        """What of it may be verified: see `first`."""
        if not self.sides:
            return Bid(self.chances, weight)
        return Bid([chance for chance, _ in self._ranked() if chance >= least], weight)

    def first(self, num_tokens: int) -> tuple[int, list[SideToken]]:
        """Of so many of its tokens, those most likely right: how many are its own, and the others.
        Each comes behind its parent."""
        if not self.sides:
            return num_tokens, []
        sides = [side for _, side in self._ranked()[:num_tokens] if side is not None]
        return num_tokens - len(sides), sides

    def _ranked(self) -> list[tuple[float, SideToken | None]]:
        """None: the next one of its own."""
        own: list[tuple[float, SideToken | None]] = [(chance, None) for chance in self.chances]
        beside = [(side.chance, side) for side in self.sides]
        return sorted([*own, *beside], key=lambda each: -each[0])

    def num_guessed(self, first: int, end: int) -> int:
        """Tokens from `first` to `end` that are not forced."""
        return max(0, end - first) - sum(self.is_forced[first:end])


@dataclass(frozen=True, slots=True)
class VerifiedBranch:
    """A path beside a guess's own tokens; it samples behind each of its tokens. `behind`: which
    verified token it follows, numbered over the guess's own and then over the branches', or -1;
    `path`: all tokens up to its last one; `masks`: for each draw, if there is a grammar."""

    behind: int
    sides: tuple[SideToken, ...]
    masks: tuple[Mask, ...]

    @property
    def path(self) -> tuple[int, ...]:
        return self.sides[-1].path


@dataclass(frozen=True, slots=True)
class Verified:
    """The part of a guess that a step verifies. `draws`: behind how many of the tokens it samples,
    from 0 on; `masks`: for each draw but the first, if there is a grammar."""

    guess: Guess
    tokens: tuple[int, ...]
    draws: tuple[int, ...]
    masks: tuple[Mask, ...]
    branches: tuple[VerifiedBranch, ...] = ()

    @property
    def num_branch_tokens(self) -> int:
        return sum([len(branch.sides) for branch in self.branches])

    @property
    def depth(self) -> int:
        """Tokens of its longest path."""
        return max([len(self.tokens), *[len(branch.path) for branch in self.branches]])


def branches_of(sides: Sequence[SideToken], num_own: int) -> tuple[VerifiedBranch, ...]:
    """Tokens beside the first `num_own` of a guess as paths, parents before children."""
    paths: list[list[SideToken]] = []
    for side in sides:
        own = next((path for path in paths if path[-1] is side.parent), None)
        if own is None:
            paths.append([side])
        else:
            own.append(side)
    numbers: dict[SideToken | None, int] = {}
    for number, side in enumerate(chain.from_iterable(paths), num_own):
        numbers[side] = number
    return tuple(
        [
            VerifiedBranch(numbers.get(path[0].parent, path[0].leaves_at), tuple(path), ())
            for path in paths
        ]
    )
