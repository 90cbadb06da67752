"""Requests that are of use only until a given time: refused when that cannot be met, ended then.

The estimate is what the queue ahead, the request's own prompt and its output are expected to take,
by the running means of what a prompt token and a decode step cost, of how much of a prompt is
cached, and of how much of max_tokens is used. Before a step of each kind was measured nothing is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ....errors import DeadlineExceeded
from ..request import Request
from .policy import OutputShare
from .step_costs import StepCosts


class Deadlines:
    """Owns which requests have one, by `Request.deadline_s`."""

    def __init__(self, costs: StepCosts, output_share: OutputShare) -> None:
        self._costs = costs
        self._output_share = output_share
        self._heap: list[tuple[float, int, Request]] = []
        self._num_open = 0

    @property
    def next_s(self) -> float | None:
        """The soonest of those that have not ended."""
        while self._heap and self._heap[0][2].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expected_s(self, request: Request, num_tokens_ahead: float, uncached: float) -> float:
        """Seconds until the request ends: `num_tokens_ahead` prompt tokens are computed before it,
        and of its own the share `uncached`."""
        token_s, step_s = self._costs.prompt_token_s, self._costs.decode_step_s
        if token_s is None or step_s is None:
            return 0.0
        share = self._output_share.of(request.client)
        num_steps = max(0.0, request.max_output_tokens * share - 1)
        num_prompt_tokens = num_tokens_ahead + request.num_prompt_tokens * uncached
        return num_prompt_tokens * token_s + num_steps * step_s

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline_s is None:
            return
        self._num_open += 1
        heappush(self._heap, (request.deadline_s, request.id, request))

    def note_finish(self, request: Request) -> None:
        """A request has ended: what is watched is kept in proportion to those that have not."""
        if request.deadline_s is None:
            return
        self._num_open -= 1
        if len(self._heap) > 2 * self._num_open + 64:
            self._heap = [item for item in self._heap if not item[2].is_finished]
            heapify(self._heap)

    def passed(self, now_s: float) -> Iterator[Request]:
        """Requests whose time is over and that have not ended."""
        while (next_s := self.next_s) is not None and next_s <= now_s:
            yield heappop(self._heap)[2]


def refusal(left_s: float, expected_s: float) -> DeadlineExceeded:
    """Why a request that has just come is refused."""
    when = f"is in {left_s:.3g} s" if left_s > 0 else f"passed {-left_s:.3g} s ago"
    if expected_s == 0:  # nothing is known of it yet
        return DeadlineExceeded(f"the deadline {when}")
    return DeadlineExceeded(f"the deadline {when}, the output is expected in {expected_s:.3g} s")


def expiry(request: Request, now_s: float) -> DeadlineExceeded:
    """Why a request is ended whose time is over."""
    assert request.deadline_s is not None, f"request {request.id} has no deadline"
    given_s = request.deadline_s - request.created_s
    spent_s = now_s - request.created_s
    return DeadlineExceeded(
        f"the deadline was {given_s:.3g} s after its arrival; {spent_s:.3g} s have passed"
    )
