"""What the scheduler has done since the start: counters, and histograms of how long requests took
and how large they were.

The histograms count a request once, when it ends, so that a step pays nothing for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .request import FinishReason, Request

SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0,
    300.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.0,
)  # fmt: skip
TOKENS = tuple(2**exponent for exponent in range(18))


@dataclass(slots=True)
class SchedulerStats:
    """Tokens, steps and requests."""

    num_finished: int = 0
    num_gated: int = 0  # times that a request had to wait for the working set
    num_missed_deadlines: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_jumped_tokens: int = 0  # of these: forced by a grammar, not sampled
    num_drafts: int = 0  # rows with guesses of what follows
    num_draft_tokens: int = 0  # guesses that were verified
    num_accepted_tokens: int = 0  # of these: were right
    num_shared_tokens: int = 0  # KV that rows did not read because a segment was read once for all
    num_steps: int = 0
    num_overlapped_steps: int = 0  # of these: planned while the one before was computed
    num_void_rows: int = 0  # computed in vain, since their requests had ended meanwhile


class Histogram:
    """Counts of values by upper bound, as Prometheus has them; the last bucket has none."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def note(self, value: float, times: int = 1) -> None:
        """A value that occurred `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def describe(self) -> dict[str, Any]:
        """As plain data; counts are not cumulative."""
        return {"bounds": self.bounds, "counts": self.counts, "sum": self.total}


class Latencies:
    """Histograms of the requests that generated and have ended with "stop" or "length".

    `inter_token` counts a request's mean once for each token behind its first.
    """

    def __init__(self) -> None:
        self.num_ended = dict.fromkeys(FinishReason, 0)
        self._histograms = {
            "time_to_first_token": Histogram(SECONDS),
            "inter_token": Histogram(TOKEN_SECONDS),
            "latency": Histogram(SECONDS),
            "queue": Histogram(SECONDS),
            "prefill": Histogram(SECONDS),
            "decode": Histogram(SECONDS),
            "prompt_tokens": Histogram(TOKENS),
            "output_tokens": Histogram(TOKENS),
        }

    def note(self, request: Request) -> None:
        """A request that has ended."""
        reason = request.finish_reason
        assert reason is not None and request.finished_s is not None
        if not request.samples:
            return
        self.num_ended[reason] += 1
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        created, finished = request.created_s, request.finished_s
        first = request.first_token_s or finished
        admitted = request.admitted_s or first
        num_tokens = request.num_output_tokens
        values = {
            "time_to_first_token": first - created,
            "latency": finished - created,
            "queue": admitted - created,
            "prefill": first - admitted,
            "decode": finished - first,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": num_tokens,
        }
        for name, value in values.items():
            self._histograms[name].note(value)
        if num_tokens > 1:
            mean_s = (finished - first) / (num_tokens - 1)
            self._histograms["inter_token"].note(mean_s, num_tokens - 1)

    def describe(self) -> dict[str, Any]:
        """As plain data: requests by finish reason, and the histograms by name."""
        ended = {reason.value: count for reason, count in self.num_ended.items()}
        histograms = {name: each.describe() for name, each in self._histograms.items()}
        return {"num_ended": ended, "histograms": histograms}
