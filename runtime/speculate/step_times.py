"""How long a step takes by its number of tokens, measured as steps go by.

No line fits: a step with a few tokens is the reading of the weights, however many; somewhere
arithmetic takes over, and vector widths make jumps. So times are means by buckets, each number of
tokens its own at first. Between buckets the curve is a straight line; beyond the last one it rises
as steeply as over all before, at least by `PRIOR_SLOPE`.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

# Of the time of the smallest known step, for one more token (llama-160m and others on a CPU: 0.04
# to 0.16 up to 8 tokens); until it is measured.
PRIOR_SLOPE = 0.06
MAX_TOKENS = 512  # in a step with drafts
_MEMORY = 32  # steps that a mean remembers
_NUM_NOTES = 8  # between two looks at the whole curve
_BOUNDS = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16),
           *range(160, 257, 32), *range(320, MAX_TOKENS + 1, 64))  # fmt: skip


class StepTimes:
    """Owns the measured times of steps with up to `MAX_TOKENS` tokens."""

    def __init__(self) -> None:
        self._means = [0.0] * len(_BOUNDS)  # seconds, by bucket
        self._sizes = [0.0] * len(_BOUNDS)  # the mean number of tokens in it
        self._counts = [0] * len(_BOUNDS)
        self._num_new = 0
        self._curve: list[float] = []  # [MAX_TOKENS + 1] seconds, of so many tokens

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step with so many tokens took so long."""
        if not 0 < num_tokens <= MAX_TOKENS:
            return
        bucket = bisect_left(_BOUNDS, num_tokens)
        mean, count = self._means[bucket], self._counts[bucket]
        if count > 4:
            duration_s = min(duration_s, 2.0 * mean)  # an interruption says nothing of the step
        count = self._counts[bucket] = min(count + 1, _MEMORY)
        self._means[bucket] = mean + (duration_s - mean) / count
        self._sizes[bucket] += (num_tokens - self._sizes[bucket]) / count
        self._num_new += 1
        if count <= 2 or self._num_new >= _NUM_NOTES:
            self._num_new = 0
            self._curve = self._fitted()

    @property
    def curve(self) -> list[float]:
        """[MAX_TOKENS + 1] seconds by the number of tokens, never falling; empty: nothing was
        measured."""
        return self._curve

    def describe(self) -> dict[int, float]:
        """Milliseconds by the largest number of tokens of a bucket, as measured."""
        means = zip(_BOUNDS, self._means, self._counts, strict=True)
        return {bound: round(1000 * mean, 4) for bound, mean, count in means if count}

    def _fitted(self) -> list[float]:
        known = [bucket for bucket, count in enumerate(self._counts) if count]
        sizes = [self._sizes[bucket] for bucket in known]
        means = list(accumulate([self._means[bucket] for bucket in known], max))
        slope = PRIOR_SLOPE * means[0]
        if len(sizes) > 1:
            slope = max(slope, (means[-1] - means[0]) / (sizes[-1] - sizes[0]))
        curve, place = [], 0
        for num_tokens in range(MAX_TOKENS + 1):
            while place < len(sizes) and sizes[place] < num_tokens:
                place += 1
            if place == 0:
                curve.append(means[0])
            elif place == len(sizes):
                curve.append(means[-1] + slope * (num_tokens - sizes[-1]))
            else:
                share = (num_tokens - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
                curve.append(means[place - 1] + share * (means[place] - means[place - 1]))
        return curve
