"""What steps of real replicas took, by their engines' own logs, and a calibration by it.

Logs tell which requests had rows, not behind how many tokens: that is counted along, as all rows of
a request are in the log once it is on. Where steps were missed, those of requests that began before
are left out.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from math import log
from types import TracebackType
from typing import Any, Self

from ...frontend.client.backend import Backend
from ...planning.calibration import Calibration
from ...planning.roofline import CostModel, Rows

_LOOK_S = 0.3  # logs end 10 s after somebody has looked, and tell of 192 steps at a time


class StepRecord:
    """Looks while the block runs. Owns all steps of the replicas from its begin to its end, as
    (rows, seconds)."""

    def __init__(self, backend: Backend, num_replicas: int) -> None:
        self.steps: list[tuple[Rows, float]] = []
        self._backend = backend
        self._read: list[tuple[str | None, int]] = [(None, 0)] * num_replicas  # run, last step
        self._before: list[dict[int, int]] = [{} for _ in range(num_replicas)]  # by request
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        self._look()
        self.steps.clear()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        self._thread.join()
        self._look()

    def _look_on(self) -> None:
        while not self._has_ended.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        for number, (run, last) in enumerate(self._read):
            answer = self._backend.connection.call("watch", replica=number, run=run, step=last)
            steps = answer["steps"]["items"]
            if answer["steps"]["num_missed"]:
                self._before[number].clear()
            for step in steps:
                self._note(step, self._before[number])
            self._read[number] = answer["run"], steps[-1]["id"] if steps else last

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
