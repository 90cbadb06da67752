"""A row's drafts as a tree: its own are one path, its branches are others beside it.

        | known | a | b | c |        the row's inputs
                    | x | y |        a branch behind a
                | d |                a branch behind the last known input

Draws have a noise of their position, whatever path they are drawn on. So of the tokens that may
follow one another at most one is what is drawn there, and what turns out right is one path. Both
halves of the engine find it here: the scheduler by what its request has become, the executor by
the draws alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from .plan import Row, RowResult


class Counted(NamedTuple):
    """What of a row counts: the numbers of its tokens (see `Branch`) that are known or right, and
    the token drawn behind them."""

    numbers: Sequence[int]
    token_id: int | None  # None: nothing was drawn


def draws_of(row: Row, result: RowResult) -> dict[int, RowResult]:
    """What was drawn behind drafts and behind the last known input, by that token's number."""
    at = row.sampled_at or (len(row.input_ids) - 1,)
    draws = dict(zip(at, (result, *result.later), strict=True))
    first = len(row.input_ids)
    for branch, drawn in zip(row.branches, result.branches, strict=True):
        if branch.sampled_at:
            numbers = [first + place for place in branch.sampled_at]
            draws.update(zip(numbers, (drawn, *drawn.later), strict=True))
        first += len(branch.input_ids)
    return draws


def right_drafts(row: Row, follows: Sequence[int]) -> list[int]:
    """The numbers of the drafts that a row's text goes on with, if `follows` is what it has behind
    the known inputs."""
    if not row.branches:
        first = len(row.input_ids) - row.num_drafts
        return list(range(first, first + num_same(row.input_ids[first:], follows)))
    tree = _Tree(row)
    right: list[int] = []
    at: int | None = tree.num_known - 1
    for token_id in follows:
        assert at is not None
        at = tree.behind(at, token_id)
        if at is None:
            break
        right.append(at)
    return right


def counted(row: Row, result: RowResult) -> Counted:
    """What counts by the draws alone: a draft while it is what was drawn in its place, and what is
    between two draws with it."""
    num_known = len(row.input_ids) - row.num_drafts
    token_id = result.token_id
    if token_id is None or not (row.num_drafts or row.branches):
        return Counted(range(num_known), token_id)
    tree, draws = _Tree(row), draws_of(row, result)
    numbers = list(range(num_known))
    while token_id is not None:
        first = tree.behind(numbers[-1], token_id)
        if first is None:
            break
        last = next((n for n in range(first, tree.end_of(first)) if n in draws), None)
        if last is None:
            break
        numbers += range(first, last + 1)
        token_id = draws[last].token_id
    return Counted(numbers, token_id)


def token_ids_of(row: Row, numbers: Sequence[int]) -> tuple[int, ...]:
    """The tokens with these numbers."""
    if not row.branches:
        return row.input_ids[: len(numbers)]
    tokens = [*row.input_ids, *chain.from_iterable(b.input_ids for b in row.branches)]
    return tuple([tokens[number] for number in numbers])


def exchanges(row: Row, right: Sequence[int]) -> list[tuple[int, int]]:
    """Entries of the row's page table to be exchanged in pairs where these drafts are right: those
    of positions with those of branches' tokens."""
    first = len(row.input_ids)
    page_of: dict[int, int] = {}
    for branch in row.branches:
        for place in range(len(branch.input_ids)):
            page_of[first + place] = branch.page_at + place
        first += len(branch.input_ids)
    return [
        (row.known_end + place, page_of[number])
        for place, number in enumerate(right)
        if number in page_of
    ]


def exchanges_by_draws(row: Row, result: RowResult) -> list[tuple[int, int]]:
    """Those of the drafts that are right by the draws alone: the executor makes these."""
    num_known = len(row.input_ids) - row.num_drafts
    return exchanges(row, counted(row, result).numbers[num_known:])


def num_same(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(tokens, others))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


class _Tree:
    """A row's tokens by number."""

    def __init__(self, row: Row) -> None:
        self.num_known = len(row.input_ids) - row.num_drafts
        self._tokens = row.input_ids
        self._ends = [len(row.input_ids)]  # of the paths
        self._firsts: list[tuple[int, int]] = []  # of branches: what it follows, and its number
        for branch in row.branches:
            self._firsts.append((branch.behind, len(self._tokens)))
            self._tokens += branch.input_ids
            self._ends.append(len(self._tokens))

    def end_of(self, number: int) -> int:
        """The number behind the last token of the path that this one is on."""
        return next(end for end in self._ends if number < end)

    def behind(self, number: int, token_id: int) -> int | None:
        """Which token behind that one is this; None: none is."""
        if number + 1 < self.end_of(number) and self._tokens[number + 1] == token_id:
            return number + 1
        for behind, first in self._firsts:
            if behind == number and self._tokens[first] == token_id:
                return first
        return None
