"""How many drafts of which requests a step verifies.

All drafts of a step compete. A draft brings a token with the probability that it and all before it
in its row are right, times the weight of its request; it costs what it makes the step longer, for
every row. The best number of drafts is the one with the most tokens a second; as the step's time
has jumps (`step_times.py`), all numbers are compared, not only the next one. A size of step whose
time is not known yet is tried instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from .step_times import MAX_TOKENS, StepTimes

# More tokens a second than without drafts, by so much, or none are verified: what a guess is worth
# is known no better, and drafting itself takes time.
MIN_GAIN = 1.02
# So many times the tokens must be expected of a step whose time is not known for it to be tried.
PROMISE = 1.1


@dataclass(frozen=True, slots=True)
class Bid:
    """A request's draft: `chances[i]` that token i and all before it on its path are right,
    falling; of a tree's tokens, parents before children."""

    chances: Sequence[float]
    weight: float = 1.0


class DraftBudget:
    """Chooses drafts by measured times."""

    def __init__(self, times: StepTimes) -> None:
        self._times = times

    def least_chance(self, num_tokens: int, num_rows: int) -> float:
        """A draft that is less likely right brings less than it costs, in a step with so many
        tokens for so many rows that sample; above 1: none can pay."""
        curve = self._times.curve
        if not curve or num_tokens >= MAX_TOKENS:
            return 0.0 if num_tokens < MAX_TOKENS else 2.0
        # The cheapest token of the next ones: a jump may lie anywhere between them.
        ends = range(num_tokens + 1, min(num_tokens + num_rows * 8, MAX_TOKENS) + 1)
        base = curve[num_tokens]
        rise = min((curve[end] - base) / (end - num_tokens) for end in ends)
        return num_rows * rise / base

    def lengths(self, num_tokens: int, bids: Sequence[Bid], room: int) -> list[int]:
        """How many tokens of each draft to verify, beside `num_tokens` others and within `room`."""
        lengths = [0] * len(bids)
        curve = self._times.curve
        room = min(room, MAX_TOKENS - num_tokens)
        if room <= 0:
            return lengths
        # Chances fall within a draft, and the sort is stable: each draft's tokens are in order.
        offers = sorted(
            (
                (bid.weight * chance, index)
                for index, bid in enumerate(bids)
                for chance in bid.chances
            ),
            key=itemgetter(0),
            reverse=True,
        )
        tokens = sum(bid.weight for bid in bids)
        best, num_taken, tokens_taken = tokens * MIN_GAIN, 0, tokens
        base = curve[num_tokens] if curve else 1.0
        for num, (worth, _) in enumerate(offers[:room], 1):
            tokens += worth
            rate = tokens * (base / curve[num_tokens + num] if curve else 1.0)
            if rate > best:
                best, num_taken, tokens_taken = rate, num, tokens
        if curve:
            # To try fewer costs little, to try more does unless they are likely.
            is_promising = tokens >= tokens_taken * PROMISE
            most = min(len(offers), room) if is_promising else num_taken
            tried = self._times.least_known(num_tokens, num_tokens + most)
            num_taken = num_taken if tried is None else tried - num_tokens
        for _, index in offers[:num_taken]:
            lengths[index] += 1
        return lengths
