"""How many new tokens running requests are expected to need: what admission keeps free for them.

A request may generate up to max_tokens and seldom does; to keep room for all of it leaves the pool
half empty, to keep none makes requests preempt each other. Two ideas meet here. From SGLang's
scheduler, the new-token ratio: a share of what may still be generated, which decays while nothing
is preempted and rises when something is; here it decays no further than to MARGIN times the share
that ended requests really used. From the past-future scheduler (Gong et al., ASPLOS 2025,
arXiv:2507.10150), the peak: requests end at different times and give back what they hold, so what
must be free is the largest need at any of those times and not the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..request import Request
from .policy import OutputShare

INITIAL_RATIO = 0.7
MIN_RATIO = 0.1
MARGIN = 1.2  # preempts 0 of 800 where 1.0 preempts 5, for 1% of throughput (docs/scheduler.md)
DECAY = 0.001  # a step: from the initial to the least ratio in 600 steps, as in SGLang
RISE = 0.1  # a preemption
MAX_RESERVED = 4096  # tokens a request, as in SGLang: a call without max_tokens asks for all


class NewTokenEstimate:
    """Expects each running request to generate `ratio`, in [MIN_RATIO, 1], of what it still may.

    Invariant: `num_running` is the sum of the running requests' `num_new_tokens`.
    """

    def __init__(self, output_share: OutputShare) -> None:
        self._output_share = output_share
        self._decaying = INITIAL_RATIO
        self.num_running = 0  # tokens that the running requests may still generate

    @property
    def ratio(self) -> float:
        """The share that is kept free."""
        return min(1.0, max(self._decaying, MARGIN * self._output_share.overall.value))

    def note_step(self) -> None:
        """A step went by."""
        self._decaying = max(MIN_RATIO, self._decaying - DECAY)

    def note_preemption(self) -> None:
        """The estimate was too low."""
        self._decaying = min(1.0, self.ratio + RISE)

    def peak(self, requests: Iterable[Request]) -> int:
        """The most tokens that these requests will need at once beyond what they hold.

        All generate a token a step; one that ends gives back what it has generated. O(n log n).
        """
        ratio = self.ratio
        ends = sorted(
            (min(MAX_RESERVED, int(r.num_new_tokens * ratio)), r.num_output_tokens)
            for r in requests
        )
        peak = given_back = 0
        num_left = len(ends)
        for num_new, num_output in ends:
            peak = max(peak, num_left * num_new - given_back)
            given_back += num_output
            num_left -= 1
        return peak

    def check(self, running: Iterable[Request]) -> None:
        """Raises when the sum is wrong (tests)."""
        num_new_tokens = sum(request.num_new_tokens for request in running)
        assert self.num_running == num_new_tokens, f"{self.num_running} {num_new_tokens}"
