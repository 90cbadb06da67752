"""The engine's counters as Prometheus families: the name and meaning of each figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Info = Mapping[str, Any]  # result of the engine's `metrics` call


@dataclass(frozen=True, slots=True)
class Figure:
    """A gauge or counter with one value: `of` reads it from the engine's report."""

    name: str  # a counter's without "_total", which Prometheus appends
    text: str
    of: Callable[[Info], float]
    kind: Literal["gauge", "counter"] = "gauge"


def of(*path: str) -> Callable[[Info], float]:
    """Reads the value at a path of keys."""

    def read(info: Info) -> float:
        value: Any = info
        for key in path:
            value = value[key]
        return float(value)

    return read


def stat(name: str) -> Callable[[Info], float]:
    """Reads one of the scheduler's counters."""
    return of("stats", name)


def kv_usage(info: Info) -> float:
    """Share of the pool that requests hold, in [0, 1]: neither free nor only cached."""
    total = info["total_tokens"]
    idle = info["free_tokens"] + info["evictable_tokens"]
    return float(1.0 - idle / total) if total else 0.0


def kv_states(info: Info) -> dict[str, float]:
    """The pool's tokens by state; they add up to the pool."""
    free, cached = float(info["free_tokens"]), float(info["evictable_tokens"])
    return {"free": free, "cached": cached, "held": info["total_tokens"] - free - cached}


def hit_rate(info: Info) -> float:
    """Share of prompt tokens that came from the cache since the start, in [0, 1]."""
    stats = info["stats"]
    return float(stats["num_cached_tokens"] / max(1, stats["num_prompt_tokens"]))


def figure_families(
    figures: tuple[Figure, ...], info: Info, labels: dict[str, str]
) -> Iterator[Metric]:
    """A family for each figure, under the same labels."""
    names, values = list(labels), list(labels.values())
    for figure in figures:
        family = GaugeMetricFamily if figure.kind == "gauge" else CounterMetricFamily
        metric = family(figure.name, figure.text, labels=names)
        metric.add_metric(values, float(figure.of(info)))
        yield metric


def histogram_family(
    name: str, text: str, histogram: Mapping[str, Any], labels: dict[str, str]
) -> Metric:
    """A family of one histogram as `runtime/schedule/stats.py` describes it."""
    metric = HistogramMetricFamily(name, text, labels=list(labels))
    bounds = [*(f"{float(bound):g}" for bound in histogram["bounds"]), "+Inf"]
    buckets = list(zip(bounds, map(float, accumulate(histogram["counts"]))))
    metric.add_metric(list(labels.values()), buckets, histogram["sum"])
    return metric


def ended_family(name: str, text: str, label: str, info: Info, labels: dict[str, str]) -> Metric:
    """Requests that have ended, by finish reason."""
    metric = CounterMetricFamily(name, text, labels=[*labels, label])
    for reason, count in info["requests"]["num_ended"].items():
        metric.add_metric([*labels.values(), reason], float(count))
    return metric
