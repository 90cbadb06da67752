"""Steps of replicas, read from their logs, and what they say of a model's times."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stemma.bench.cluster.simulated import _costs
from stemma.bench.cluster.step_record import StepRecord
from stemma.frontend.client.backend import Backend
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

PROMPT = {"work": {"tokens": 40, "logits": 1, "keys": 100, "pairs": 40 * 60 + 820}, "ms": 12.0}
DECODE = {"work": {"tokens": 1, "logits": 1, "keys": 101, "pairs": 101}, "ms": 3.0}


class Connection:
    """To one replica, whose log grows by a prompt and two tokens behind the first look."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.most = 3  # that an answer has
        self._has_grown = False

    def call(
        self, method: str, *, replica: int, run: str | None, step: int, tree: int = 0, pool: int = 0
    ) -> dict[str, Any]:
        assert (method, replica) == ("watch", 0) and run in (None, "a")
        assert (tree, pool) == (0 if run is None else 5, 0 if run is None else 6)
        told = [each for each in self.steps if each["id"] > step]
        num_missed = len(told) - self.most if step else 0
        told = told[-self.most :]
        for each in () if self._has_grown else (PROMPT, DECODE, DECODE):
            self.steps.append({**each, "id": len(self.steps) + 1})
        self._has_grown = True
        steps = {"items": told, "num_missed": max(0, num_missed)}
        pool_view = None if pool else {"version": 6}
        return {"run": "a", "steps": steps, "tree": {"version": 5}, "pool": pool_view}


class LoggingBackend:
    def __init__(self) -> None:
        self.connection = Connection()


def test_steps_of_the_block_are_noted_once_with_what_they_computed() -> None:
    backend = LoggingBackend()
    backend.connection.steps.append({**DECODE, "id": 1})  # before the block
    with StepRecord(cast(Backend, backend), 1) as record:
        pass
    assert record.steps == [
        (PROMPT["work"], 0.012), (DECODE["work"], 0.003), (DECODE["work"], 0.003),
    ]  # fmt: skip


def test_a_calibration_gives_back_what_steps_of_a_size_took() -> None:
    costs = _costs(EMBEDDED_MODEL)
    with StepRecord(cast(Backend, LoggingBackend()), 1) as record:
        pass
    calibration = record.calibration(costs)
    for num_rows, rows, step_s in ((40, [(40, 60)], 0.012), (1, [(1, 100)], 0.003)):
        predicted_s = costs.step_time(rows, 1).total_s * calibration.ratio(num_rows)
        assert predicted_s == pytest.approx(step_s, rel=0.02)
