"""What steps of real replicas took, by their engines' own logs, and a calibration by it."""

from __future__ import annotations

from collections import defaultdict
from math import log
from typing import Any

from ...frontend.client.backend import Backend
from ...planning.calibration import Calibration
from ...planning.roofline import CostModel
from ..harness.step_watch import StepWatch


class StepRecord(StepWatch):
    """Owns the steps of the replicas while the block runs: what each computed (`work_of`,
    runtime/schedule/step_log.py) and the seconds that it took."""

    def __init__(self, backend: Backend, num_replicas: int) -> None:
        self.steps: list[tuple[dict[str, int], float]] = []
        super().__init__(backend, num_replicas, self._note)

    def _note(self, replica: int, steps: list[dict[str, Any]], num_missed: int) -> None:
        self.steps += [(step["work"], step["ms"] / 1e3) for step in steps]

    def calibration(self, costs: CostModel) -> Calibration:
        """Measured over predicted seconds of all steps of about as many tokens, by octaves."""
        sums: defaultdict[int, list[tuple[int, float, float]]] = defaultdict(list)
        for work, step_s in self.steps:
            num_tokens = work["tokens"]
            predicted_s = costs.counted_s(
                num_tokens, work["logits"], num_keys=work["keys"], num_pairs=work["pairs"]
            )
            sums[num_tokens.bit_length()].append((num_tokens, step_s, predicted_s))
        logs, ratios = [], []
        for _, found in sorted(sums.items()):
            tokens, measured, predicted = map(sum, zip(*found, strict=True))
            logs.append(log(tokens / len(found)))
            ratios.append(measured / predicted)
        return Calibration(tuple(logs), tuple(ratios))
