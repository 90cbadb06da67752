"""What another rank than 0 does: the same steps as rank 0, of its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.lora.adapter import AdapterModule
from ..execute.model_runner import ModelRunner
from ..models.layers.ranks import Ranks
from ..schedule.plan import StepPlan
from .orders import PlanReader


class RankRunner:
    """Its methods are orders, see `orders`."""

    def __init__(
        self, folder: Path, config: ModelConfig, ranks: Ranks, options: Mapping[str, Any]
    ) -> None:
        self._runner = ModelRunner(folder, config, ranks=ranks, **options)
        self._plans = PlanReader()

    def execute(self, plan: StepPlan, rows: Sequence[tuple[Any, ...]]) -> None:
        self._runner.execute(self._plans.plan(plan, rows))

    def warm_up(self) -> None:
        self._runner.warm_up()

    def load_adapter(self, slot: int, modules: Sequence[AdapterModule]) -> None:
        self._runner.load_adapter_weights(slot, self._runner.prepare_adapter(modules))
