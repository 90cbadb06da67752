"""`/metrics` of several models: every figure of an engine with its model as a label, and what is
loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..api.metrics import ModelFigures
from ..generation.service import Service
from .cascades import ServedCascade, cascade_families
from .model_slot import ModelSlot

_LABELS = ("model", "model_name")  # the latter: of figures under other engines' names

_GAUGES: tuple[tuple[str, str, Callable[[ModelSlot], float]], ...] = (
    ("stemma_model_loaded", "1 while the model is loaded.", lambda slot: slot.is_running),
    ("stemma_model_memory_bytes", "What it takes by plan; 0: none.", lambda slot: slot.num_bytes),
    ("stemma_model_requests_waiting", "Requests that wait until it is loaded.",
     lambda slot: slot.num_waiting),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, Callable[[ModelSlot], float]], ...] = (
    ("stemma_model_loads", "Times that loading it was begun.", lambda slot: slot.num_loads),
    ("stemma_model_load_failures", "Times that it could not be loaded.",
     lambda slot: slot.num_failed_loads),
    ("stemma_model_unloads", "Times that it was unloaded.", lambda slot: slot.num_unloads),
)  # fmt: skip


def families_of(
    services: Mapping[ModelSlot, Service], cascades: Mapping[str, ServedCascade]
) -> Callable[[], Awaitable[list[Metric]]]:
    """What asks all engines that are there."""
    figures = {slot: ModelFigures(service) for slot, service in services.items()}

    async def families() -> list[Metric]:
        running = [slot for slot in figures if slot.is_running]
        each = await asyncio.gather(*(figures[slot].families() for slot in running))
        found = [*zip(running, each)]
        return [*_joined(found), *_of_pool(figures), *cascade_families(cascades)]

    return families


def _joined(found: Iterable[tuple[ModelSlot, Iterable[Metric]]]) -> list[Metric]:
    """One family of each name, whose samples all have their model's name."""
    joined: dict[str, Metric] = {}
    for slot, families in found:
        for family in families:
            own = joined.setdefault(family.name, Metric(family.name, family.documentation,
                                                        family.type, family.unit))  # fmt: skip
            own.samples += [_labelled(sample, slot.name) for sample in family.samples]
    return list(joined.values())


def _labelled(sample: Any, model: str) -> Any:
    if any(label in sample.labels for label in _LABELS):
        return sample
    return sample._replace(labels={"model": model, **sample.labels})


def _of_pool(slots: Iterable[ModelSlot]) -> list[Metric]:
    slots = list(slots)
    found: list[Metric] = []
    for family, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, text, of in figures:
            metric = family(name, text, labels=["model"])
            for slot in slots:
                metric.add_metric([slot.name], float(of(slot)))
            found.append(metric)
    return found
