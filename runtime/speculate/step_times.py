"""How long a step takes by its number of tokens, measured as steps go by.

No line fits: a step with a few tokens is the reading of the weights, however many; somewhere
arithmetic takes over, and vector widths make jumps. So times are kept by buckets, each number of
tokens its own at first, and joined by straight lines; beyond the last one the curve rises as
steeply as over all before, at least by `PRIOR_SLOPE`. To each time comes the host's: a token that
a guess brings saves a step's planning, too.

A size that no step has had looks as cheap as the next larger one that is known, so that nobody
would ever try it: small sizes are tried on purpose (`least_known`) until each was measured a few
times, and so is a step without drafts, of any size. What was measured longest ago is forgotten now
and then, and tried again: the machine's load changes, and contexts grow.

What disturbs a measurement makes it longer, never shorter. So where more tokens took less time,
fewer do not take more; and of a few measurements the shortest counts, so that one disturbed step
does not keep drafts away for ever, and with them what would correct it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate
from statistics import median
from typing import cast

import numpy as np

# Of the time of the smallest known step, for one more token (llama-160m and others on a CPU: 0.04
# to 0.16 up to 8 tokens); until it is measured.
PRIOR_SLOPE = 0.06
MAX_TOKENS = 512  # in a step with drafts
_MEMORY = 9  # steps of a bucket
_NUM_FOR_MEDIAN = 5
_NUM_NOTES = 16  # between two looks at the whole curve, once there are enough
_NUM_KNOWN = 3  # measurements with which a size counts as known
_MAX_TRIED = 16  # tokens of a step that is tried on purpose; a bucket each
_NUM_UNTIL_FORGOTTEN = 256  # steps from one size that is forgotten to the next
_BOUNDS = (*range(1, 17), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16),
           *range(160, 257, 32), *range(320, MAX_TOKENS + 1, 64))  # fmt: skip
_NUM_TOKENS = np.arange(MAX_TOKENS + 1, dtype=np.float64)


class StepTimes:
    """Owns the measured times of steps with up to `MAX_TOKENS` tokens."""

    def __init__(self) -> None:
        self._seconds = [deque[float](maxlen=_MEMORY) for _ in _BOUNDS]
        self._sizes = [0.0] * len(_BOUNDS)  # the mean number of tokens of a bucket's steps
        self._is_set_up = [False] * len(_BOUNDS)
        self._noted_at = [0] * len(_BOUNDS)  # the number of the last note
        self._num_notes = 0
        self._host_seconds = deque[float](maxlen=_MEMORY)
        self._curve: list[float] = []

    def note(self, num_tokens: int, duration_s: float, host_s: float = 0.0) -> None:
        """A step with so many tokens took so long, and `host_s` more to plan and to apply. The
        first one of a size may have recorded or compiled something, and is left out."""
        if not 0 < num_tokens <= MAX_TOKENS:
            return
        self._host_seconds.append(host_s)
        bucket = bisect_left(_BOUNDS, num_tokens)
        if not self._is_set_up[bucket]:
            self._is_set_up[bucket] = True
            return
        seconds = self._seconds[bucket]
        seconds.append(duration_s)
        self._sizes[bucket] += (num_tokens - self._sizes[bucket]) / len(seconds)
        self._num_notes += 1
        self._noted_at[bucket] = self._num_notes
        if self._num_notes % _NUM_UNTIL_FORGOTTEN == 0:
            self._forget_oldest()
        if len(seconds) <= _NUM_FOR_MEDIAN or self._num_notes % _NUM_NOTES == 0:
            self._curve = self._fitted()

    def least_known(self, first: int, last: int) -> int | None:
        """Of the sizes from `first` to `last` the one that was measured least often; None: each of
        them often enough. Of the larger ones only `first` is tried, which is there anyway."""
        buckets = [bisect_left(_BOUNDS, first), *range(first, min(last, _MAX_TRIED))]
        counts = [len(self._seconds[bucket]) for bucket in buckets]
        least = min(counts)
        return None if least >= _NUM_KNOWN else first + counts.index(least)

    def is_known(self, num_tokens: int) -> bool:
        """Whether a step of this size, one of those that are tried, was measured often enough."""
        return num_tokens > _MAX_TRIED or self.least_known(num_tokens, num_tokens) is None

    def _forget_oldest(self) -> None:
        known = [bucket for bucket, seconds in enumerate(self._seconds) if seconds]
        oldest = min(known, key=self._noted_at.__getitem__)
        if len(known) > 1:
            self._seconds[oldest].clear()
            self._sizes[oldest] = 0.0

    @property
    def curve(self) -> list[float]:
        """[MAX_TOKENS + 1] seconds by the number of tokens, the host's share included; never
        falling; empty: nothing was measured."""
        return self._curve

    def describe(self) -> dict[int, float]:
        """Milliseconds by the largest number of tokens of a bucket, as measured."""
        pairs = zip(_BOUNDS, self._seconds, strict=True)
        return {bound: round(1000 * typical(seconds), 4) for bound, seconds in pairs if seconds}

    def _fitted(self) -> list[float]:
        known = [bucket for bucket, seconds in enumerate(self._seconds) if seconds]
        sizes = [self._sizes[bucket] for bucket in known]
        times = [typical(self._seconds[bucket]) for bucket in known]
        times = list(accumulate(reversed(times), min))[::-1]
        slope = PRIOR_SLOPE * times[0]
        if len(sizes) > 1:
            slope = max(slope, (times[-1] - times[0]) / (sizes[-1] - sizes[0]))
        curve = np.interp(_NUM_TOKENS, sizes, times)
        # What a step costs however many tokens it has: the cheapest one shows it.
        curve += min(self._host_seconds)
        curve += slope * np.maximum(_NUM_TOKENS - sizes[-1], 0.0)
        return cast("list[float]", curve.tolist())


def typical(seconds: deque[float]) -> float:
    """Of measurements of the same, which disturbances make longer."""
    return min(seconds) if len(seconds) < _NUM_FOR_MEDIAN else median(seconds)
