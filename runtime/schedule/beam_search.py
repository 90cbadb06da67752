"""Beam search: the k likeliest continuations of a prompt, kept side by side. The rules alone.

Source: those of transformers' `generate(num_beams=k)` (`GenerationMixin._beam_search`, version 5),
which takes the best `max(2, 1 + number of stop tokens) * k` next tokens of all hypotheses together:

    rank        0 ........ k - 1 | k ...................... num_candidates - 1
    if it ends  finished         | dropped
    else        the first k of all go on

Cost: one merge of k sorted lists a step, up to num_candidates pairs. It does not know who computes
a hypothesis.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from math import isinf
from operator import attrgetter
from typing import Literal, NamedTuple

from .plan import TokenLogprob

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How wide a search is, how it ranks and when it ends.

    A finished hypothesis has the score `logprob / num_tokens ** length_penalty`, its stop token
    counted. The search ends with k finished hypotheses: with `early_stopping` True at once, with
    False when the best live one would rank behind them all if it ended now, with "never" when it
    would however long it became (which is known if `length_penalty` > 0).
    """

    width: int  # k, >= 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    def score(self, logprob: float, num_tokens: int) -> float:
        """Of a hypothesis of so many tokens."""
        return float(logprob / num_tokens**self.length_penalty)


class Candidate(NamedTuple):
    """A live hypothesis with one more token."""

    parent: int  # index among the live ones
    token_id: int
    logprob: float  # of all its tokens


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Output tokens, and the sum of their log-probabilities."""

    token_ids: array[int]  # 'i'
    logprob: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A hypothesis that has ended; a stop token is not among its `token_ids`."""

    token_ids: array[int]  # 'i'
    logprob: float
    score: float
    has_stopped: bool  # else it is as long as an output may be


class BeamSearch:
    """The live and the finished hypotheses, both best first.

    Invariant: at most k of each; the live ones all have the same number of tokens.
    """

    def __init__(self, params: BeamParams, *, num_stop_ids: int, max_tokens: int) -> None:
        self.params = params
        self.num_candidates = max(2, 1 + num_stop_ids) * params.width
        self.live = [Hypothesis(array("i"), 0.0)]
        self.finished: list[Finished] = []
        self._max_tokens = max_tokens
        self._num_tokens = 0  # of the live ones

    @property
    def is_done(self) -> bool:
        """Whether nothing can change the finished hypotheses any more, by the params' rule."""
        if not self.live:
            return True
        params, length = self.params, self._num_tokens
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        return params.score(self.live[0].logprob, length) <= self.finished[-1].score

    def candidates(self, best: Sequence[Sequence[TokenLogprob]]) -> list[Candidate]:
        """The best of what the live hypotheses may go on with, best first; `best[i]`: the likeliest
        `num_candidates` next tokens of the i-th, also best first, fewer where no more are allowed.
        """
        extended = [
            _extended(parent, hypothesis, tokens)
            for parent, (hypothesis, tokens) in enumerate(zip(self.live, best, strict=True))
        ]
        found = merge(*extended, key=attrgetter("logprob"), reverse=True)
        return list(islice(found, self.num_candidates))

    def advance(
        self, candidates: Sequence[Candidate], ends: Sequence[bool], stop_ids: frozenset[int]
    ) -> list[int]:
        """Take the candidates, `ends[i]`: whether the i-th ends with its token. Returns the
        indices of those that go on, now `live`."""
        self._num_tokens += 1
        is_full = self._num_tokens >= self._max_tokens
        for candidate, has_stopped in list(zip(candidates, ends, strict=True))[: self.params.width]:
            if has_stopped or is_full:
                self.finished.append(self._finished(candidate, has_stopped, stop_ids))
        self.finished.sort(key=attrgetter("score"), reverse=True)
        del self.finished[self.params.width :]
        going_on = [] if is_full else [i for i, has_stopped in enumerate(ends) if not has_stopped]
        del going_on[self.params.width :]
        self.live = [
            Hypothesis(self._tokens(candidates[i]), candidates[i].logprob) for i in going_on
        ]
        return going_on

    def best_now(self) -> list[Finished]:
        """The finished hypotheses, and the live ones as if they ended here, best first."""
        num_tokens, params = max(1, self._num_tokens), self.params
        live = [
            Finished(h.token_ids, h.logprob, params.score(h.logprob, num_tokens), False)
            for h in self.live
        ]
        return sorted([*self.finished, *live], key=attrgetter("score"), reverse=True)

    def _tokens(self, candidate: Candidate) -> array[int]:
        return self.live[candidate.parent].token_ids + array("i", (candidate.token_id,))

    def _finished(
        self, candidate: Candidate, has_stopped: bool, stop_ids: frozenset[int]
    ) -> Finished:
        is_stop = candidate.token_id in stop_ids
        return Finished(
            self.live[candidate.parent].token_ids if is_stop else self._tokens(candidate),
            candidate.logprob,
            self.params.score(candidate.logprob, self._num_tokens),
            has_stopped,
        )


def _extended(
    parent: int, hypothesis: Hypothesis, best: Sequence[TokenLogprob]
) -> Iterator[Candidate]:
    """A hypothesis with each of its next tokens, best first."""
    for token_id, logprob in best:
        if not isinf(logprob):
            yield Candidate(parent, token_id, hypothesis.logprob + logprob)
