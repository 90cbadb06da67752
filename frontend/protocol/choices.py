"""How `select` picks a choice from the log probabilities of the choices' tokens.

The three methods are SGLang's. Scoring a choice computes its tokens after the branch's (shared)
prefix; nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """One choice: its token ids, their log probabilities in this context (natural log) and, for
    the unconditional method, without it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float, ...] = ()

    @property
    def mean_logprob(self) -> float:
        """Mean log probability per token."""
        return sum(self.logprobs) / len(self.logprobs)


def decide(method: str, scores: Sequence[ChoiceScore]) -> int:
    """Index of the best choice under `method`; the first on ties."""
    if method == "greedy_token_selection":
        return _greedy(scores)
    if method == "unconditional_likelihood_normalized":
        gains = [(sum(s.logprobs) - sum(s.unconditional)) / len(s.logprobs) for s in scores]
        return _argmax(gains)
    return _argmax([score.mean_logprob for score in scores])


def _greedy(scores: Sequence[ChoiceScore]) -> int:
    """Token by token: keep the choices whose next token is the likeliest one.

    A choice that has ended continues with its own mean, so that a short choice is neither
    favoured nor penalized for having no further token.
    """
    alive = list(range(len(scores)))
    for position in range(max(len(score.logprobs) for score in scores)):
        values = [_at(scores[index], position) for index in alive]
        best = max(values)
        alive = [index for index, value in zip(alive, values) if value == best]
        if len(alive) == 1:
            break
    return alive[0]


def _at(score: ChoiceScore, position: int) -> float:
    if position < len(score.logprobs):
        return score.logprobs[position]
    return score.mean_logprob


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
