"""Requests that are of use only until a given time: refused when that cannot be met, ended then.

The estimate is what the queue ahead, the request's own prompt and its output are expected to take,
by the running means of what a prompt token and a decode step cost, of how much of a prompt is
cached, and of how much of max_tokens is used. Before a step of each kind was measured nothing is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from ....errors import DeadlineExceeded
from ..request import Request
from ..stats import SchedulerStats
from .policy import OutputShare
from .step_costs import StepCosts


class Deadlines:
    """Owns which requests have a deadline, and how many prompt tokens are ahead of a new request.

    The scheduler tells it of every request: `add`, `note_admission` once, `note_finish`. Invariant:
    `num_waiting_tokens` are the prompts of those that were neither admitted nor have ended.
    """

    def __init__(
        self,
        costs: StepCosts,
        output_share: OutputShare,
        stats: SchedulerStats,
        clock: Callable[[], float],
    ) -> None:
        """It counts misses in `stats`; `clock` is that of `Request.deadline_s`."""
        self._costs = costs
        self._output_share = output_share
        self._stats = stats
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._num_open = 0
        self.num_waiting_tokens = 0

    @property
    def next_s(self) -> float | None:
        """The soonest deadline of those that have not ended."""
        while self._heap and self._heap[0][2].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request) -> None:
        """A request has come. Raises DeadlineExceeded, and knows nothing of it, where its output is
        not expected in time."""
        if request.deadline_s is not None:
            self._require_time(request, request.deadline_s)
            self._num_open += 1
            heappush(self._heap, (request.deadline_s, request.id, request))
        self.num_waiting_tokens += request.num_prompt_tokens

    def note_admission(self, request: Request) -> None:
        """A request runs for the first time: its prompt is ahead of nobody any more."""
        self.num_waiting_tokens -= request.num_prompt_tokens

    def note_finish(self, request: Request) -> None:
        """A request has ended: what is watched is kept in proportion to those that have not."""
        if not request.is_admitted:
            self.num_waiting_tokens -= request.num_prompt_tokens
        if request.deadline_s is None:
            return
        self._num_open -= 1
        if len(self._heap) > 2 * self._num_open + 64:
            self._heap = [item for item in self._heap if not item[2].is_finished]
            heapify(self._heap)

    def expire(self) -> Iterator[Request]:
        """Requests whose time is over, with their errors set; the caller ends each before it asks
        for the next."""
        now_s = self._clock()
        while (next_s := self.next_s) is not None and next_s <= now_s:
            request = heappop(self._heap)[2]
            given_s, spent_s = next_s - request.created_s, now_s - request.created_s
            request.error = (
                f"the deadline was {given_s:.3g} s after its arrival; {spent_s:.3g} s have passed"
            )
            request.error_kind = DeadlineExceeded.__name__
            self._stats.num_missed_deadlines += 1
            yield request

    def _require_time(self, request: Request, deadline_s: float) -> None:
        left_s, expected_s = deadline_s - self._clock(), self._expected_s(request)
        if left_s > 0 and expected_s <= left_s:
            return
        self._stats.num_missed_deadlines += 1
        when = f"is in {left_s:.3g} s" if left_s > 0 else f"passed {-left_s:.3g} s ago"
        if expected_s == 0:  # no step has been measured
            raise DeadlineExceeded(f"the deadline {when}")
        raise DeadlineExceeded(f"the deadline {when}, the output is expected in {expected_s:.3g} s")

    def _expected_s(self, request: Request) -> float:
        """Seconds until the request ends: what waits is computed before it, but for the share that
        prompts so far have found in the cache; so is its own prompt."""
        token_s, step_s = self._costs.prompt_token_s, self._costs.decode_step_s
        if token_s is None or step_s is None:
            return 0.0
        uncached = 1.0 - self._stats.num_cached_tokens / max(1, self._stats.num_prompt_tokens)
        num_steps = max(0.0, request.max_output_tokens * self._output_share.of(request.client) - 1)
        num_prompt_tokens = (self.num_waiting_tokens + request.num_prompt_tokens) * uncached
        return num_prompt_tokens * token_s + num_steps * step_s
