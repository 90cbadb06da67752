"""What steps of real replicas took, by their engines' own logs, and a calibration by it.

Logs tell which requests had rows, not behind how many tokens: that is counted along, as all rows of
a request are in the log once it is on. Where steps were missed, those of requests that began before
are left out.
"""

from __future__ import annotations

from collections import defaultdict
from math import log
from typing import Any

from ...frontend.client.backend import Backend
from ...planning.calibration import Calibration
from ...planning.roofline import CostModel, Rows
from ..harness.step_watch import StepWatch


class StepRecord(StepWatch):
    """Owns all steps of the replicas while the block runs, as (rows, seconds)."""

    def __init__(self, backend: Backend, num_replicas: int) -> None:
        self.steps: list[tuple[Rows, float]] = []
        self._before: list[dict[int, int]] = [{} for _ in range(num_replicas)]  # by request
        super().__init__(backend, num_replicas, self._note_all)

    def _note_all(self, replica: int, steps: list[dict[str, Any]], num_missed: int) -> None:
        if num_missed:
            self._before[replica].clear()
        for step in steps:
            self._note(step, self._before[replica])

    def _note(self, step: dict[str, Any], before: dict[int, int]) -> None:
        rows = []
        for request, _, num_tokens, num_cached, _ in step["rows"]:
            if num_cached or request not in before:
                before[request] = num_cached
            rows.append((num_tokens, before[request]))
            before[request] += num_tokens
        if not before.keys() >= set(step["decode"]):
            return
        for request in step["decode"]:
            rows.append((1, before[request]))
            before[request] += 1
        assert not step["num_more"], "a log names no more rows than 48 of each kind"
        self.steps.append((rows, step["ms"] / 1e3))

    def calibration(self, costs: CostModel) -> Calibration:
        """Measured over predicted seconds of all steps of about as many tokens, by octaves."""
        sums: defaultdict[int, list[tuple[int, float, float]]] = defaultdict(list)
        for rows, step_s in self.steps:
            num_tokens = sum(num for num, _ in rows)
            predicted = costs.step_time(rows, len(rows)).total_s
            sums[num_tokens.bit_length()].append((num_tokens, step_s, predicted))
        logs, ratios = [], []
        for _, found in sorted(sums.items()):
            tokens, measured, predicted_s = map(sum, zip(*found, strict=True))
            logs.append(log(tokens / len(found)))
            ratios.append(measured / predicted_s)
        return Calibration(tuple(logs), tuple(ratios))
