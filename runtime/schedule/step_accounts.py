"""What steps have cost, and whom: for the limits of the next ones, for tenants and programs, and
for statistics. One step whose result is in, or many that differ by one token of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .in_flight import InFlightStep
from .plan import Row, StepResult
from .queue.admission import NewTokenEstimate
from .queue.fairness import TenantShares
from .queue.step_costs import StepCosts
from .request import Request
from .stats import SchedulerStats


class StepAccounts:
    """Owns nothing: what a step changes in these records is changed here, but for the tokens that
    it generates (outputs.py)."""

    def __init__(
        self,
        costs: StepCosts,
        shares: TenantShares,
        new_tokens: NewTokenEstimate,
        stats: SchedulerStats,
    ) -> None:
        self._costs = costs
        self._shares = shares
        self._new_tokens = new_tokens
        self._stats = stats
        self._row_tokens = costs.row_tokens

    def note_plan(self, planned: InFlightStep, *, is_overlapped: bool) -> None:
        """A step was planned, while another is computed or not."""
        segments = planned.plan.segments
        self._stats.num_shared_tokens += sum(each.num_saved_tokens for each in segments)
        self._stats.num_overlapped_steps += is_overlapped

    def note(self, planned: InFlightStep, result: StepResult, now_s: float) -> None:
        """A step with rows was computed; its rows are charged next."""
        self._stats.num_steps += 1
        self._new_tokens.note_step()
        if result.duration_s is not None:
            is_load = not all(request.is_ahead for request in planned.requests)
            self._costs.note(planned.plan, result.duration_s, now_s, is_load=is_load)
        self._stats.num_computed_tokens += planned.plan.num_tokens
        self._stats.num_void_rows += len(planned.void)
        self._row_tokens = self._costs.row_tokens

    def charge(self, request: Request, row: Row) -> None:
        """A request's program and tenant have had a row of the step."""
        num_tokens = row.known_end - row.start
        cost = num_tokens if num_tokens > 1 else self._row_tokens
        self._shares.charge(request, cost + (row.num_tokens - num_tokens))

    def repeat(
        self,
        rows: Sequence[Request],
        steps: Sequence[tuple[float, float]],
        num_saved_tokens: int,
        reorder: Callable[[], None] | None,
    ) -> None:
        """All that is done above, for steps of these rows one after the other, with their durations
        and the times of their ends. `num_saved_tokens`: that each has by segments. `reorder` puts
        who runs in order before a step, which changes nothing while nobody's level does; None:
        there are no levels."""
        num_steps, num_tokens = len(steps), len(steps) * len(rows)
        services = []
        for duration_s, ended_s in steps:
            self._new_tokens.note_step()
            self._costs.note_rows(len(rows), 0, duration_s, ended_s)
            services.append(self._costs.row_tokens)
        self._charge_all(rows, services, reorder)
        self._new_tokens.num_running -= num_tokens
        self._stats.num_steps += num_steps
        self._stats.num_computed_tokens += num_tokens
        self._stats.num_generated_tokens += num_tokens
        self._stats.num_shared_tokens += num_steps * num_saved_tokens

    def _charge_all(
        self,
        rows: Sequence[Request],
        services: Sequence[float],
        reorder: Callable[[], None] | None,
    ) -> None:
        if reorder is not None:
            reorder()
        if self._shares.charge_all(rows, services):
            return
        for index, service in enumerate(services):
            if reorder is not None and index:
                reorder()
            for request in rows:
                self._shares.charge(request, service)
