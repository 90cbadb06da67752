"""What another process than the engine's does: the same steps, of its own part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoint.lora.adapter import AdapterModule
from ..execute.model_runner import ModelRunner
from ..schedule.plan import PendingStep, StepPlan
from .orders import PlanReader


class RankRunner:
    """Its methods are orders, see `orders`."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plans = PlanReader()
        self._pending: PendingStep | None = None  # which a device may still be computing

    def execute(self, plan: StepPlan, rows: Sequence[tuple[Any, ...]]) -> None:
        step = self._runner.submit(self._plans.plan(plan, rows))
        before, self._pending = self._pending, step
        if before is not None:
            before.result()

    def warm_up(self) -> None:
        self._runner.warm_up()

    def stream_kv(self) -> None:
        self._runner.stream_to(None)

    def load_adapter(self, slot: int, modules: Sequence[AdapterModule]) -> None:
        self._runner.load_adapter_weights(slot, self._runner.prepare_adapter(modules))
