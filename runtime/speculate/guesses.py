"""Drafts from a draft model: what the executor has guessed behind a step for the next one.

A guess is offered with the draft model's own probability of each token; how often such a guess is
what is drawn is learnt, by that probability and the place in the draft. How many tokens are to be
guessed ahead follows from how often they were right and from what they cost (`num_ahead`): with
n rows whose guesses are right with a probability r each, the K for which

    (n + sum over rows of r + r^2 + ... + r^K) / (time of a step of n (1 + K) tokens + K * a pass)

is largest (the formula of Leviathan et al. 2023, arXiv:2211.17192, 3.5, with measured times).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from operator import mul

from .budget import MIN_GAIN, PROMISE
from .drafter import NO_DRAFT, Draft, Subject
from .step_times import MAX_TOKENS

NAME = "model"
_NUM_BINS = 16  # of probabilities
_NUM_PLACES = 4  # in a draft; the last one stands for all behind it
_PRIOR_WEIGHT = 3.0
_MEMORY = 256.0  # tokens of a cell, before older ones count for less
_PRIOR_RATE = 0.7  # guess, until an op's first outputs
_OWN_WEIGHT = 6.0  # tokens of its op's that an output's own rate begins with
_MAX_OPS = 1024
_LEAST_WORTH = 0.1  # of a guess ahead
_FIRST_AHEAD = 3  # while nothing is known of times
# Steps without guesses, behind which some are tried again; each time in vain twice as many.
_VAIN = 48
_MOST_VAIN = 16 * _VAIN


class ModelDrafter:
    """Knows how often guesses were right, and what a pass costs."""

    def __init__(self, most: int | None = None) -> None:
        """most: tokens that can be guessed at a time; None: any number."""
        self.most = most
        self._cells = [
            [_prior(index % _NUM_BINS) * _PRIOR_WEIGHT, _PRIOR_WEIGHT]
            for index in range(_NUM_PLACES * _NUM_BINS)
        ]
        self._rates: OrderedDict[Hashable, list[float]] = OrderedDict()  # by op: right, seen
        self.pass_s: float | None = None  # of all rows, a token each; None: not known
        self._num_vain = 0
        self._patience = _VAIN

    def open(self, subject: Subject) -> ModelText:
        return ModelText(self, self._rate_of(subject.op_key))

    def note_passes(self, seconds: float, num_passes: int) -> None:
        """The draft model took so long for so many tokens of each row."""
        if num_passes:
            pass_s = seconds / num_passes
            self.pass_s = pass_s if self.pass_s is None else 0.8 * self.pass_s + 0.2 * pass_s

    def num_ahead(
        self,
        texts: Sequence[ModelText],
        curve: Sequence[float],
        room: int,
        is_known: Callable[[int], bool],
    ) -> list[int]:
        """How many tokens, at most `room`, to guess of each text for a step that computes these
        alone. curve: see `StepTimes`; is_known: whether it was measured at such a size. Where it
        was not, one more than what pays is guessed if much is expected of it, so that it can be."""
        if self.pass_s is None or not curve:
            return [min(_FIRST_AHEAD, room)] * len(texts)
        rates = [text.rate for text in texts]
        worth = [text.share for text in texts]
        num_rows = num_tokens = len(texts)
        tokens, best_ahead, tried = float(num_rows), 0, 0
        best_tokens = tokens
        best = num_rows / curve[min(num_rows, MAX_TOKENS)] * MIN_GAIN
        for ahead in range(1, room + 1):
            worth = [chance * rate for chance, rate in zip(worth, rates, strict=True)]
            wanted = [chance for chance in worth if chance >= _LEAST_WORTH]
            num_tokens += len(wanted)
            if not wanted or num_tokens > MAX_TOKENS:
                break
            tokens += sum(wanted)
            rate = tokens / (curve[num_tokens] + ahead * self.pass_s)
            if rate > best:
                best, best_ahead, best_tokens = rate, ahead, tokens
            elif ahead == best_ahead + 1 and tokens >= best_tokens * PROMISE:
                tried = 0 if is_known(num_tokens) else ahead
        best_ahead = max(best_ahead, tried)
        if not best_ahead:
            self._num_vain += 1
            if self._num_vain < self._patience:
                return [0] * num_rows
            self._num_vain, self._patience = 0, min(2 * self._patience, _MOST_VAIN)
            return [min(2, room)] * num_rows
        self._num_vain, self._patience = 0, _VAIN
        return [_num_worth(text, best_ahead) for text in texts]

    def confidence(self, cell: int) -> float:
        right, seen = self._cells[cell]
        return right / seen

    def learn(self, cell: int, is_right: bool) -> None:
        counts = self._cells[cell]
        if counts[1] >= _MEMORY:
            counts[0] *= 0.5
            counts[1] *= 0.5
        counts[0] += is_right
        counts[1] += 1.0

    def _rate_of(self, op: Hashable) -> list[float]:
        rate = self._rates.pop(op, None)
        if rate is None:
            rate = [_PRIOR_RATE * _OWN_WEIGHT, _OWN_WEIGHT]
            if len(self._rates) >= _MAX_OPS:
                self._rates.popitem(last=False)
        self._rates[op] = rate
        return rate


class ModelText:
    """One output, and what was guessed to follow it."""

    def __init__(self, drafter: ModelDrafter, of_op: list[float]) -> None:
        self._drafter = drafter
        self._of_op = of_op
        self._right, self._seen = _OWN_WEIGHT * of_op[0] / of_op[1], _OWN_WEIGHT
        self.share = 1.0  # of its guesses, how many were preferred to those of others
        self._tokens: tuple[int, ...] = ()
        self._cells: tuple[int, ...] = ()

    @property
    def rate(self) -> float:
        """How often a guess is right whose predecessors are."""
        return self._right / self._seen

    @property
    def has_guess(self) -> bool:
        """Whether it knows what may follow now."""
        return bool(self._tokens)

    def offer(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """These may follow; logprobs: the draft model's. What is not a number ends the guess."""
        end = next((i for i, each in enumerate(logprobs) if math.isnan(each)), len(tokens))
        self._tokens = tuple(tokens[:end])
        self._cells = tuple(map(_cell, range(end), logprobs))

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens, self._cells = self._behind(tokens)

    def propose(self, room: int, tail: Sequence[int] = ()) -> Draft:
        tokens, cells = self._behind(tail)
        if not tokens:
            return NO_DRAFT
        cells = cells[:room]
        confidences = tuple(map(self._drafter.confidence, cells))
        return Draft(tokens[:room], confidences, NAME, cells)

    def note_choice(self, is_chosen: bool) -> None:
        """Its guess was verified, or another's in its place."""
        self.share += 0.1 * (is_chosen - self.share)

    def note(self, draft: Draft, num_accepted: int) -> None:
        for place, cell in enumerate(draft.evidence[: num_accepted + 1]):
            self._drafter.learn(cell, place < num_accepted)
        num_seen = num_accepted + (num_accepted < len(draft.tokens))
        fade = max(0.0, 1.0 - num_seen / _MEMORY)
        self._of_op[0] = fade * self._of_op[0] + num_accepted
        self._of_op[1] = fade * self._of_op[1] + num_seen
        self._right += num_accepted
        self._seen += num_seen

    def close(self) -> None:
        pass

    def _behind(self, tail: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What is left of the guess behind these tokens: nothing unless it begins with them."""
        num = len(tail)
        if self._tokens[:num] != tuple(tail):
            return (), ()
        return self._tokens[num:], self._cells[num:]


def _num_worth(text: ModelText, most: int) -> int:
    chances = accumulate([text.share * text.rate, *[text.rate] * (most - 1)], mul)
    return sum(chance >= _LEAST_WORTH for chance in chances)


def _cell(place: int, logprob: float) -> int:
    bin_ = min(_NUM_BINS - 1, int(math.exp(min(0.0, logprob)) * _NUM_BINS))
    return min(place, _NUM_PLACES - 1) * _NUM_BINS + bin_


def _prior(bin_: int) -> float:
    """How often a token is right that the draft model takes for so likely: a guess."""
    return 0.3 + 0.7 * (bin_ + 0.5) / _NUM_BINS
