"""Copies between tiers are queued beside the steps, and the next step waits for the pool alone."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stemma.runtime.execute import model_runner
from stemma.runtime.execute.accelerator import InterpretedAccelerator, PassedEvent
from stemma.runtime.execute.model_runner import ModelRunner
from stemma.runtime.memory.asynchronous_transfer import Moment
from stemma.runtime.memory.copies import Transfer
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.schedule.plan import PageUpdate, Row, StepPlan


class TwoOrders(InterpretedAccelerator):
    """Notes in which order something is queued, what is held for what, and copies to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, object]] = []
        self._orders: list[str] = []

    @contextmanager
    def queue(self) -> Iterator[None]:
        with self._in("steps"):
            yield

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self._in("copies"):
            yield

    @contextmanager
    def _in(self, order: str) -> Iterator[None]:
        self._orders.append(order)
        yield
        self._orders.pop()

    def event(self) -> PassedEvent:
        event = PassedEvent()
        self.log.append((f"event in {self._orders[-1]}", event))
        return event

    def hold_for(self, event: Moment) -> None:
        self.log.append((f"{self._orders[-1]} are held", event))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append((f"copy in {self._orders[-1]}", None))
        super().copy(target, source)


def test_a_step_is_held_for_the_pool_before_it_is_computed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator = TwoOrders()
    monkeypatch.setattr(model_runner, "accelerator_for", lambda device: accelerator)
    runner = ModelRunner(
        checkpoint, read_model_config(checkpoint), dtype="float64", device="cuda",
        kernels="reference", num_pages=8, page_size=8, num_host_pages=4, max_running_requests=2,
        max_model_len=64,
    )  # fmt: skip
    row = Row(0, 0, 0, tuple(range(5, 12)), PageUpdate(0, (3,)))
    pages = array("i", [5]), array("i", [2])
    copies = Transfer("store", *pages), Transfer("load", array("i", [6]), array("i", [1]))
    accelerator.log.clear()
    result = runner.execute(StepPlan(0, (row,), transfers=copies))
    names = [name for name, _ in accelerator.log]
    held = names.index("steps are held")
    assert names[:held].count("copy in copies") == 4 and "copy in steps" not in names[:held]
    assert "copy in steps" in names[held:] and "copy in copies" not in names[held:]
    _, event = accelerator.log[held]
    place = accelerator.log.index(("event in copies", event))
    assert "copy in copies" in names[place:held], "the bus takes it later"
    assert result.transfer_s is not None and result.transfer_s >= 0
