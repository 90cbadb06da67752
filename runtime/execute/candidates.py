"""What a draft guesses of a row: tokens ahead, and candidates that stand beside them, with which
they are a tree.

The candidates for a place are what the model would draw if its logits were the draft's and those
before them were not there: with the noise of that position, so that they are its draws as often as
can be (docs/how-it-works/model-drafts.md#trees).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.registry import Kernels
from ...kernels.sampling_rows import SamplingRows
from ..schedule.plan import SideGuess, TokenLogprob

_LEAST_WORTH = math.log(0.1)  # of the path to a token beside that is gone on behind (guess)


@dataclass(slots=True, eq=False)
class Guesses:
    """What is guessed of a row: so many tokens ahead, and candidates beside them. Numbered as in
    `SideGuess`."""

    num_wanted: int
    num_beside: int  # for each place
    ahead: list[TokenLogprob] = field(default_factory=list)
    beside: list[SideGuess] = field(default_factory=list)
    worth: list[float] = field(default_factory=list)  # of `beside`: log-probability of its path
    num_before_last: int = 0  # of `beside`: for places before the last of those ahead

    def add(self, leaf: Leaf, token_id: int, logprob: float, rank: int) -> None:
        """A candidate for behind a leaf, before which there were `rank`."""
        if rank == 0 and leaf.number == len(self.ahead) - 1:
            self.ahead.append(TokenLogprob(token_id, logprob))
            self.num_before_last = len(self.beside)
        else:
            self.beside.append(SideGuess(leaf.number, token_id, logprob, rank))
            self.worth.append(leaf.worth + logprob)

    def own_leaf(self) -> Leaf:
        """The last token ahead."""
        place = len(self.ahead) - 1
        worth = sum([token.logprob for token in self.ahead])
        return Leaf(self, place, self.ahead[place].token_id, worth, place - 1)

    def likeliest_side(self) -> Leaf | None:
        """Of the candidates beside for the last place the one with the likeliest path, if it
        is likely enough to go on behind it."""
        last = range(self.num_before_last, len(self.beside))
        best = max(last, key=self.worth.__getitem__, default=None)
        if best is None or self.worth[best] < _LEAST_WORTH:
            return None
        side, number = self.beside[best], self.num_wanted + best
        return Leaf(self, number, side.token_id, self.worth[best], side.behind)

    def path_to(self, number: int) -> list[int]:
        """The numbers of the tokens up to that one."""
        path: list[int] = []
        while number >= self.num_wanted:
            path.insert(0, number)
            number = self.beside[number - self.num_wanted].behind
        return [*range(number + 1), *path]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A guess that is gone on behind; -1: what was drawn."""

    guesses: Guesses
    number: int = -1
    token_id: int = 0
    worth: float = 0.0  # log-probability of its path
    behind: int = -1


def draw_candidates(
    kernels: Kernels,
    logits: Tensor,
    parameters: Mapping[str, npt.NDArray[Any]],
    leaves: Sequence[Leaf],
) -> None:
    """Guess behind each of N leaves what is drawn of logits [N, vocab_size], with the parameters of
    SamplingRows [N], and beside it what would be if that were not there, and so on: the best by
    logits and noise, as the model may draw one of them with that noise. Changes the logits IN PLACE
    where any is to be beside."""
    rows = SamplingRows(**{name: torch.from_numpy(each) for name, each in parameters.items()})
    token_ids, _ = kernels.sample(logits, rows)
    logprobs = kernels.token_logprobs(logits, token_ids).double()
    total = _logits_of(logits, token_ids) - logprobs  # what makes logits log-probabilities
    for rank in range(1 + max(leaf.guesses.num_beside for leaf in leaves)):
        if rank:
            logits.scatter_(1, token_ids.unsqueeze(1), -math.inf)
            token_ids, _ = kernels.sample(logits, rows)
            logprobs = _logits_of(logits, token_ids) - total
        for each in zip(leaves, token_ids.tolist(), logprobs.tolist(), strict=True):
            leaf, token_id, logprob = each
            if rank <= leaf.guesses.num_beside and (rank == 0 or logprob > -math.inf):
                leaf.guesses.add(leaf, token_id, logprob, rank)


def _logits_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """logits [N, vocab_size] of one token [N] each -> [N] float64"""
    return logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).double()
