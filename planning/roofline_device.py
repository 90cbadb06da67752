"""The device of a simulated engine whose steps take what the roofline model says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..runtime.memory.copies import BlockRestore
from ..runtime.schedule.plan import StepPlan
from .calibration import NO_CALIBRATION, Calibration
from .devices import host_bytes_s
from .roofline import CostModel, Rows


@dataclass(frozen=True)
class RooflineDevice:
    """What each engine computes on: a GPU, or several that hold a model together. `calibration`:
    how much longer steps were measured to take than the model says."""

    costs: CostModel
    num_tokens: int
    max_running_requests: int
    calibration: Calibration = NO_CALIBRATION

    @cached_property
    def prefill_token_ms(self) -> float:
        """Of a prompt that is long enough for the arithmetic to be the limit."""
        return 1e3 * self.rows_s([(2048, 0)], 1) / 2048

    def rows_s(self, rows: Rows, num_sampled: int) -> float:
        """How long a step of such rows takes."""
        num_tokens = sum([num for num, _ in rows])
        step_s = self.costs.step_time(rows, num_sampled).total_s
        return step_s * self.calibration.ratio(num_tokens)

    def step_s(self, plan: StepPlan) -> float:
        """Its rows, and the copies of what has come from elsewhere into its pages."""
        rows = [(len(row.input_ids), row.start) for row in plan.rows]
        # Of a row with guesses every token that may turn out right is drawn.
        num_sampled = sum([max(1, len(r.sampled_at)) for r in plan.rows if r.sampling is not None])
        copied = sum(len(each.pages) for each in plan.transfers if isinstance(each, BlockRestore))
        copy_s = 2 * copied * self.costs.model.kv_bytes_per_token / self.costs.device.kv_bytes_s
        return self.rows_s(rows, num_sampled) + copy_s

    def decode_times_s(self, before: Sequence[int], num_steps: int) -> list[float]:
        """See FleetDevice."""
        ratio = self.calibration.ratio(len(before))
        return [step_s * ratio for step_s in self.costs.decode_times(before, num_steps)]

    def copy_s(self, num_tokens: int) -> float:
        """Over the link to the host's memory."""
        return num_tokens * self.costs.model.kv_bytes_per_token / host_bytes_s(self.costs.device)
