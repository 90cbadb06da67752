"""`/metrics`: everything in Prometheus form; works also while the engine is down."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ...errors import EngineError
from ..generation.service import Service
from ..metrics.compat import compat_families
from ..metrics.engine_metrics import engine_families
from ..metrics.fleet_metrics import fleet_families

_TIMEOUT_S = 5.0


def router(service: Service) -> APIRouter:
    """The routes."""
    return metrics_routes(service, ModelFigures(service).families)


def metrics_routes(
    service: Service, find_families: Callable[[], Awaitable[list[Metric]]]
) -> APIRouter:
    """`find_families`: what there is beside this process's own counts."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response)
    async def metrics(request: Request) -> Response:
        """Counters, gauges and histograms for Prometheus."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        body = encode(_registry(service, await find_families()))
        return Response(body, media_type=content_type)

    return routes


class ModelFigures:
    """The figures of one model's engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._throughput = _Throughput()

    async def families(self) -> list[Metric]:
        """As they are now; of an engine that does not answer that it is down."""
        families = [*_server_families(self._service)]
        try:
            info = await self._service.engine.connection.acall("metrics", _TIMEOUT_S)
        except EngineError:
            families += [_engine_up(0.0), *fleet_families(await _fleet(self._service))]
        else:
            families += [_engine_up(1.0), *engine_families(info)]
            families += fleet_families(info.get("replicas", ()))
            if self._service.settings.metrics_compat:
                speed = self._throughput.note(info)
                families += compat_families({**info, "output_tokens_per_s": speed})
        return families


async def _fleet(service: Service) -> list[dict[str, Any]]:
    """How replicas are that do not answer, as far as their router knows; none without one."""
    try:
        if not service.has_replicas:
            return []
        fleet = await service.engine.connection.acall("fleet", _TIMEOUT_S, asks=False)
    except EngineError:
        return []
    replicas: list[dict[str, Any]] = fleet["replicas"]
    return replicas


class _Throughput:
    """Output tokens a second between two scrapes."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def note(self, info: dict[str, Any]) -> float:
        now, count = time.monotonic(), int(info["stats"]["num_generated_tokens"])
        before, self._last = self._last, (now, count)
        if before is None or now <= before[0] or count < before[1]:
            return 0.0
        return (count - before[1]) / (now - before[0])


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def _registry(service: Service, families: Iterable[Metric]) -> CollectorRegistry:
    """One registry of this process's counts and the engine's figures."""
    registry = CollectorRegistry()
    registry.register(_Families([*service.metrics.registry.collect(), *families]))
    return registry


def _server_families(service: Service) -> Iterator[Metric]:
    restarts = CounterMetricFamily(
        "stemma_engine_restarts", "Times that the engine's process had to be started anew."
    )
    restarts.add_metric([], float(getattr(service.engine, "num_restarts", 0)))
    yield restarts


def _engine_up(value: float) -> Metric:
    metric = GaugeMetricFamily("stemma_engine_up", "1 while the engine answers.")
    metric.add_metric([], value)
    return metric
