"""A device of a simulated fleet that computes its steps, and says how much CPU time they took.

With one thread that is what the step takes on a core alone, whatever else the machine does. So a
simulated fleet of such devices is a real one but for processes and sockets.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.models.model_config import read_model_config
from ...runtime.schedule.plan import PageUpdate, Row, StepPlan
from ...runtime.schedule.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ...runtime.execute.model_runner import ModelRunner

_GREEDY = SamplingParams(temperature=0.0)
_REPEATS = 7
# Rows, tokens of each, tokens before these: decode steps, and prompts, around those of the loads.
_SHAPES = (
    (1, 1, 400), (4, 1, 400), (16, 1, 400), (24, 1, 400),
    (1, 32, 400), (1, 64, 300), (1, 128, 300), (1, 256, 0), (2, 512, 0), (4, 512, 0),
)  # fmt: skip


class MeasuredDevice:
    """Owns a model runner with its KV."""

    def __init__(self, model: Path, num_tokens: int, max_running_requests: int) -> None:
        from ...runtime.execute.model_runner import ModelRunner

        config = read_model_config(model)
        self.num_tokens = num_tokens
        self.max_running_requests = max_running_requests
        self._vocab_size = config.vocab_size
        self._runner: ModelRunner = ModelRunner(
            model,
            config,
            max_total_tokens=num_tokens,
            max_running_requests=max_running_requests,
            max_step_tokens=2048,
        )
        self._runner.warm_up()
        self.prefill_token_ms = 1e3 * self.rows_s(2, 512, 0) / 1024

    def step_s(self, plan: StepPlan) -> float:
        """Compute it. Its tokens are made ones of the vocabulary: which they are costs nothing."""
        rows = tuple(
            row._replace(input_ids=tuple([each % self._vocab_size for each in row.input_ids]))
            for row in plan.rows
        )
        plan = replace(plan, rows=rows)
        began_s = time.process_time()
        self._runner.execute(plan)
        return time.process_time() - began_s

    def decode_times_s(self, before: Sequence[int], num_steps: int) -> Sequence[float]:
        """It computes each step."""
        return ()

    def copy_s(self, num_tokens: int) -> float:
        """There is no host tier."""
        raise AssertionError("no host tier")

    def rows_s(self, num_rows: int, num_tokens: int, before: int) -> float:
        """A step of so many rows alike: the median of several."""
        pages = before + num_tokens
        rows = tuple(
            Row(
                index,
                index,
                before,
                (0,) * num_tokens,
                PageUpdate(0, tuple(range(index * pages, (index + 1) * pages))),
                sampling=_GREEDY,
            )
            for index in range(num_rows)
        )
        times = [self.step_s(StepPlan(number, rows)) for number in range(2 + _REPEATS)]
        return statistics.median(times[2:])

    def measured(self) -> dict[tuple[int, int, int], float]:
        """Seconds that steps of the loads' shapes take, as `Calibration.of` takes them."""
        room = self.num_tokens
        return {each: self.rows_s(*each) for each in _SHAPES if each[0] * sum(each[1:]) <= room}
