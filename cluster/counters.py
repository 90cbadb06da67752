"""What replicas have counted, over all engines that each has had: counters that never decrease.

An engine's counters begin at zero. A sum over the engines that run would fall when one is lost, and
whoever takes rates of it (Prometheus) would count all the others' once more. So what a lost engine
had counted when it was asked last is kept; what it counted behind that is lost with it.

Engines name their runs: one whose connection broke and was opened anew is the same, and counts on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Path = tuple[str, ...]
Counts = dict[Path, Any]  # numbers, or lists and dicts of them

# What of a report only grows while its engine runs.
_COUNTERS: tuple[Path, ...] = (
    ("stats",),
    ("requests",),
    ("speculation", "sources"),
    ("ahead",),
    ("foretold",),
    ("leases", "num_broken"),
    ("host", "stored_tokens"),
    ("host", "loaded_tokens"),
    *(
        ("grammars", name)
        for name in (
            "num_hits",
            "num_compiled",
            "num_fsm",
            "num_pushdown",
            "num_llguidance",
            "num_outlines",
            "num_refused",
            "compile_s",
        )
    ),
    *(("lora", name) for name in ("num_loads", "num_evictions")),
)
# Of what several say under one name, what is no sum.
_THE_FIRST = frozenset({"page_size", "bounds"})
_THE_LEAST = frozenset({"uptime_s", "since_step_s"})


class ReplicaCounters:
    """One replica's. Invariant: no number in `total()` is ever less than before."""

    def __init__(self) -> None:
        self._ended: Counts = {}  # of engines before
        self._running: Counts = {}  # of the engine that reported last
        self._run: Any = None

    def note(self, report: dict[str, Any]) -> None:
        """What its engine says now; `report`: of `info` or `metrics`."""
        if report.get("run") != self._run:
            self._ended, self._running = self.total(), {}
            self._run = report.get("run")
        self._running |= counts_of(report)

    def total(self) -> Counts:
        """Of all its engines."""
        return sum_of_counts([self._ended, self._running])


def counts_of(report: dict[str, Any]) -> Counts:
    """The counters that a report has."""
    found = {path: _at(report, path) for path in _COUNTERS}
    return {path: value for path, value in found.items() if value is not None}


def sum_of_counts(counts: Iterable[Counts]) -> Counts:
    """Of each counter, over all that have it."""
    known = list(counts)
    paths = dict.fromkeys(path for each in known for path in each)
    return {path: summed([each[path] for each in known if path in each]) for path in paths}


def with_counts(report: dict[str, Any], counts: Counts) -> dict[str, Any]:
    """The report with these in place of its counters; what it does not have stays away."""
    told = dict(report)
    for path, value in counts.items():
        if _at(report, path) is None:
            continue
        step = told
        for name in path[:-1]:
            step[name] = step = dict(step[name])
        step[path[-1]] = value
    return told


def summed(values: list[Any]) -> Any:
    """Sums of numbers, place by place; what is no number is the first one's."""
    first = values[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {n: _summed_field(n, [each[n] for each in values if n in each]) for n in names}
    if isinstance(first, list) and all(
        isinstance(value, list) and len(value) == len(first) for value in values
    ):
        return [summed(list(each)) for each in zip(*values, strict=True)]
    if isinstance(first, bool) or not all(isinstance(value, int | float) for value in values):
        return first
    return sum(values)


def _summed_field(name: str, values: list[Any]) -> Any:
    if name in _THE_FIRST:
        return values[0]
    numbers = [value for value in values if isinstance(value, int | float)]
    return min(numbers) if name in _THE_LEAST and numbers else summed(values)


def _at(report: dict[str, Any], path: Path) -> Any:
    value: Any = report
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
