"""Steps through the stages of a model, one behind the other (pipeline parallelism): when each is
done, and how long stages stand still. Torch-free.

A stage computes one step after the other, and hands over what it has computed while it goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from .roofline import CostModel, Rows


class Pipeline:
    """Owns the times at which its stages are free, on a clock of its own that begins at 0."""

    def __init__(self, stages: Sequence[CostModel]) -> None:
        self._stages = stages
        self._free_s = [0.0] * len(stages)
        self._busy_s = 0.0

    def pass_through(self, rows: Rows, num_sampled: int, begun_s: float = 0.0) -> float:
        """When a step has been computed by all stages that enters the first one not before
        `begun_s`. Steps come in their order; the last stage samples."""
        num_tokens = sum(num for num, _ in rows)
        at_s = begun_s
        for number, costs in enumerate(self._stages):
            is_last = number == len(self._stages) - 1
            step_s = costs.step_time(rows, num_sampled if is_last else 0).total_s
            at_s = self._free_s[number] = max(at_s, self._free_s[number]) + step_s
            self._busy_s += step_s
            if not is_last:
                at_s += costs.handover_s(num_tokens)
        return at_s

    @property
    def lost_share(self) -> float:
        """Of the stages' time until the last one is free: in which they had nothing to compute. Of
        m equal steps through p equal stages (p - 1) / (m + p - 1) (Huang et al. 2019, "GPipe")."""
        return 1.0 - self._busy_s / (len(self._stages) * self._free_s[-1])


def decode_s(stages: Sequence[CostModel], rows: Rows) -> tuple[float, float]:
    """Seconds between two tokens of each row where the rows decode in as many steps as there are
    stages, and the share of that in which stages have nothing to compute."""
    num_steps = min(len(stages), len(rows))
    num_each = -(-len(rows) // num_steps)
    whole_s = Pipeline(stages).pass_through(rows[:num_each], num_each)
    last = len(stages) - 1
    times_s = [
        costs.step_time(rows[:num_each], num_each if number == last else 0).total_s
        for number, costs in enumerate(stages)
    ]
    round_s = max(whole_s, num_steps * max(times_s))
    return round_s, 1.0 - num_steps * sum(times_s) / (len(stages) * round_s)


def prompt_s(stages: Sequence[CostModel], num_tokens: int, chunk: int) -> tuple[float, float]:
    """Seconds that a prompt takes chunk behind chunk, and the share that stages have nothing to do
    meanwhile."""
    pipeline, ended_s = Pipeline(stages), 0.0
    for start in range(0, num_tokens, chunk):
        num = min(chunk, num_tokens - start)
        ended_s = pipeline.pass_through([(num, start)], int(start + num == num_tokens))
    return ended_s, pipeline.lost_share
