"""Steps of replicas, read from their logs, and what they say of a model's times."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stemma.bench.cluster.simulated import _costs
from stemma.bench.cluster.step_record import StepRecord
from stemma.frontend.client.backend import Backend
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

PROMPT = {"rows": [(7, "prefill", 40, 60, 0)], "decode": [], "num_more": 0, "ms": 12.0}
DECODE = {"rows": [], "decode": [7], "num_more": 0, "ms": 3.0}


class Connection:
    """To one replica, whose log grows by a prompt and two tokens behind the first look."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.most = 3  # that an answer has
        self._has_grown = False

    def call(self, method: str, *, replica: int, run: str | None, step: int) -> dict[str, Any]:
        assert (method, replica) == ("watch", 0) and run in (None, "a")
        told = [each for each in self.steps if each["id"] > step]
        num_missed = len(told) - self.most if step else 0
        told = told[-self.most :]
        for each in () if self._has_grown else (PROMPT, DECODE, DECODE):
            self.steps.append({**each, "id": len(self.steps) + 1})
        self._has_grown = True
        return {"run": "a", "steps": {"items": told, "num_missed": max(0, num_missed)}}


class LoggingBackend:
    def __init__(self) -> None:
        self.connection = Connection()


def test_rows_are_behind_the_tokens_that_were_computed_or_cached() -> None:
    backend = LoggingBackend()
    backend.connection.steps.append({**DECODE, "decode": [3], "id": 1})  # before the block
    with StepRecord(cast(Backend, backend), 1) as record:
        pass
    rows = [rows for rows, _ in record.steps]
    assert rows == [[(40, 60)], [(1, 100)], [(1, 101)]]
    assert [step_s for _, step_s in record.steps] == [0.012, 0.003, 0.003]


def test_steps_of_requests_whose_begin_was_missed_are_left_out() -> None:
    backend = LoggingBackend()
    backend.connection.steps.append({**DECODE, "decode": [3], "id": 1})
    backend.connection.most = 2  # of three
    with StepRecord(cast(Backend, backend), 1) as record:
        pass
    assert record.steps == []


def test_a_calibration_gives_back_what_steps_of_a_size_took() -> None:
    costs = _costs(EMBEDDED_MODEL)
    with StepRecord(cast(Backend, LoggingBackend()), 1) as record:
        pass
    calibration = record.calibration(costs)
    for num_rows, rows, step_s in ((40, [(40, 60)], 0.012), (1, [(1, 100)], 0.003)):
        predicted_s = costs.step_time(rows, 1).total_s * calibration.ratio(num_rows)
        assert predicted_s == pytest.approx(step_s, rel=0.02)
