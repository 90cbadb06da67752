"""Plans without a result yet: while the device computes one, the next is made (overlap), or while
each stage of a pipeline computes one, those behind them.

The host plans step t + 1 while the device computes t, so that the device never waits for a plan:
NanoFlow's asynchronous scheduling (arXiv:2408.12757), as in SGLang and vLLM. The tokens sampled in
t are not known yet: a continuing row names the row of t whose token is its input. Whether that
token ends the request is known one step late; if so, its row of t + 1 is void.

Through the stages of a pipeline go plans of other requests each, one more than there are stages so
that none waits for a plan; a prompt may be in several of them, chunk behind chunk.

    a request's tokens   0 ....... num_computed ....... num_tokens . num_scheduled
                         |  results are in  | plans in flight compute |  1, being sampled  |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...radix.checkpoints import Checkpoint
from .cache.kv_cache import FreedPages
from .cache.prefix_cache import PendingCopies
from .cache.tiers import InsertedPrefix
from .plan import Row, StepPlan
from .request import Request

# Share of rows under a grammar that may wait while the others of their step continue. A waiting row
# runs in every second step only: with m such rows in a hundred a step loses m / 2 to save its host
# time, which is about 3 of a hundred on a GPU (docs/how-it-works/scheduler.md).
MAX_WAITING_SHARE = 1 / 16


class Held(NamedTuple):
    """What a request that has left returns once no plan uses it any more."""

    remains: FreedPages | None
    table_row: int


@dataclass(slots=True, eq=False)
class InFlightStep:
    """A plan with its requests, row by row, and what to undo if it fails.

    `continued`: the requests that may continue before its results are in, with their rows.
    """

    plan: StepPlan
    requests: tuple[Request, ...]
    publications: tuple[InsertedPrefix | None, ...]
    unsettled: PendingCopies
    continued: dict[Request, int] = field(default_factory=dict)
    void: set[Request] = field(default_factory=set)  # have left: their rows' results are ignored
    held: list[Held] = field(default_factory=list)
    suspects: list[InsertedPrefix] = field(default_factory=list)  # to unpublish after it
    # Of the recurrent state: what each row writes, and what the plan writes beside its rows.
    checkpoints: tuple[Checkpoint | None, ...] = ()
    written: tuple[Checkpoint, ...] = ()

    def row_of(self, request: Request) -> Row | None:
        """The request's row, if it has one."""
        if request not in self.requests:
            return None
        return self.plan.rows[self.requests.index(request)]

    def publications_of(self, requests: Container[Request]) -> Iterator[InsertedPrefix]:
        """The inserts of these requests' rows."""
        for request, publication in zip(self.requests, self.publications, strict=True):
            if publication is not None and request in requests:
                yield publication


class InFlight:
    """Owns the plans in flight, oldest first.

    Invariant: at most `max_plans`, and no page or table row used by one of them is given to another
    request before its result is in. While `is_closed`, no plan is added until there is none.
    """

    def __init__(self, *, has_overlap: bool, num_stages: int = 1) -> None:
        """has_overlap: requests may continue from tokens that are not known yet, with one stage."""
        self._plans: deque[InFlightStep] = deque()
        self._has_overlap = has_overlap and num_stages == 1
        self.max_plans = num_stages + 1 if num_stages > 1 else 1 + self._has_overlap
        self.max_waiting_share = MAX_WAITING_SHARE
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._plans)

    @property
    def newest(self) -> InFlightStep | None:
        """The plan made last."""
        return self._plans[-1] if self._plans else None

    @property
    def continued(self) -> dict[Request, int]:
        """Requests that continue from a token sampled by the newest plan, with its rows."""
        return self._plans[-1].continued if self._plans else {}

    @property
    def held(self) -> list[Held]:
        """All that is to be returned later."""
        return [held for planned in self._plans for held in planned.held]

    def close(self) -> None:
        """Add no plan before all results are in."""
        self.is_closed = bool(self._plans)

    def add(self, planned: InFlightStep) -> None:
        """Add a plan just made."""
        assert len(self._plans) < self.max_plans, "the plan before was not taken in"
        self._plans.append(planned)
        if self._has_overlap:
            num_waiting = _find_continued(planned)
            if num_waiting > self.max_waiting_share * len(planned.requests):
                self.close()

    def take(self, step_id: int) -> InFlightStep:
        """Remove and return the oldest plan, whose result is in."""
        assert self._plans and self._plans[0].plan.step_id == step_id, "not the oldest plan's"
        planned = self._plans.popleft()
        self.is_closed = self.is_closed and bool(self._plans)
        return planned

    def take_all(self) -> list[InFlightStep]:
        """Remove and return all plans; the device is done with each."""
        assert self._plans, "no plan is in flight"
        planned = list(self._plans)
        self._plans.clear()
        self.is_closed = False
        return planned

    def leave(self, request: Request) -> InFlightStep | None:
        """Make the rows of a leaving request void; returns the last plan that has one, if any."""
        naming = [planned for planned in self._plans if request in planned.requests]
        for planned in naming:
            planned.void.add(request)
        return naming[-1] if naming else None

    def is_proven(self, request: Request, planned: InFlightStep) -> bool:
        """Whether all that a running request reads was there before `planned`, the oldest plan,
        which is no longer in flight, or was read by its row there, which succeeded. Otherwise it
        may have since adopted KV that another row of that plan was to write."""
        rows = (newer.row_of(request) for newer in self._plans)
        row = next((row for row in rows if row is not None), None)
        if request.num_published > request.num_scheduled_tokens:
            return False  # it has not read all that it adopted
        if row is None and request not in planned.requests:
            return request.num_published != request.num_scheduled_tokens
        start = request.num_scheduled_tokens if row is None else row.start
        return request in planned.requests and start == request.num_computed_tokens

    def check(self, running: Sequence[Request]) -> None:
        """Raises AssertionError when the plans do not agree with the requests."""
        assert len(self._plans) <= self.max_plans
        ends: dict[Request, int] = {}
        rows = {held.table_row for held in self.held}
        for planned in self._plans:
            for row, request in zip(planned.plan.rows, planned.requests, strict=True):
                if request in planned.void:
                    assert row.table_row in rows, f"the table row of {request.id} is not kept"
                else:
                    assert row.table_row == request.table_row, f"request {request.id} has moved"
                    ends[request] = row.known_end
        assert set(ends) <= set(running), "a request has left, and its row is not void"
        for request in running:
            num_computed, num_scheduled = request.num_computed_tokens, request.num_scheduled_tokens
            assert num_computed <= num_scheduled <= request.num_tokens + 1, request.id
            assert request in ends or num_computed == num_scheduled, request.id
            assert ends.get(request, 0) <= num_scheduled, request.id


def _find_continued(planned: InFlightStep) -> int:
    """Note which of a plan's rows may continue, except those whose output is full. Returns how many
    must wait for their tokens, since not only the draw decides what follows."""
    num_waiting = 0
    for index, (row, request) in enumerate(zip(planned.plan.rows, planned.requests)):
        num_begun = len(request.begun)
        if row.mask is not None or row.num_best or request.num_output_tokens < num_begun:
            num_waiting += 1
        elif row.sampling is not None:
            num_output = len(request.earlier) - len(request.prompt)
            num_output += row.start + len(row.input_ids) + 1
            if num_output < request.max_output_tokens:
                planned.continued[request] = index
    return num_waiting
