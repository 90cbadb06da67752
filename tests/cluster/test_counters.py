"""Counters of replicas: their sums never fall, whatever becomes of the engines."""

from __future__ import annotations

import random
from typing import Any

from stemma.cluster.counters import (
    ReplicaCounters,
    counts_of,
    sum_of_counts,
    summed,
    with_counts,
)

Paths = dict[tuple[str, ...], Any]


def report(run: str, num_steps: int, **fields: Any) -> dict[str, Any]:
    return {"run": run, "stats": {"num_steps": num_steps}, "host": None, **fields}


def steps(counters: ReplicaCounters) -> int:
    return int(counters.total()[("stats",)]["num_steps"])


def test_another_engine_counts_beside_those_before() -> None:
    counters = ReplicaCounters()
    counters.note(report("one", 100))
    counters.note(report("one", 150))
    assert steps(counters) == 150
    counters.note(report("other", 20))
    assert steps(counters) == 170
    counters.note(report("other", 25))
    assert steps(counters) == 175


def test_what_only_some_reports_have_is_kept() -> None:
    counters = ReplicaCounters()
    ended = {"num_ended": {"stop": 3}, "histograms": {"h": {"bounds": [1, 2], "counts": [1, 2, 0]}}}
    counters.note(report("one", 1, requests=ended))
    counters.note(report("one", 2))
    counters.note(report("other", 5, requests=ended))
    twice = {"num_ended": {"stop": 6}, "histograms": {"h": {"bounds": [1, 2], "counts": [2, 4, 0]}}}
    assert counters.total()[("requests",)] == twice and steps(counters) == 7


def test_counts_stand_in_for_what_a_report_has_and_nothing_else() -> None:
    told = report("one", 1, leases={"num_broken": 2, "num_leases": 5}, lora={})
    counts: Paths = {("stats",): {"num_steps": 9}, ("leases", "num_broken"): 7}
    counts |= {("lora", "num_loads"): 3, ("host", "stored_tokens"): 1}
    shown = with_counts(told, counts)
    assert shown["stats"] == {"num_steps": 9} and shown["lora"] == {} and shown["host"] is None
    assert shown["leases"] == {"num_broken": 7, "num_leases": 5}
    assert told["leases"]["num_broken"] == 2
    assert counts_of(told).keys() == {("stats",), ("leases", "num_broken")}


def test_sums_are_place_by_place_and_what_is_no_number_is_the_first_ones() -> None:
    one = {"n": 1, "page_size": 16, "uptime_s": 5.0, "is": True, "name": "a", "counts": [1, 2]}
    other = {"n": 2, "page_size": 16, "uptime_s": 3.0, "is": True, "name": "b", "counts": [3, 4]}
    assert summed([one, other]) == {
        "n": 3, "page_size": 16, "uptime_s": 3.0, "is": True, "name": "a", "counts": [4, 6]
    }  # fmt: skip
    assert summed([{"a": 1}, {"b": 2}]) == {"a": 1, "b": 2}


def test_no_sum_falls_however_engines_come_and_go() -> None:
    rng = random.Random(4)
    replicas = [ReplicaCounters() for _ in range(3)]
    runs, counted, truth = [0] * 3, [0] * 3, 0
    for _ in range(400):
        number = rng.randrange(3)
        if rng.random() < 0.2:
            runs[number], counted[number] = runs[number] + 1, 0
        added = rng.randrange(20)
        counted[number], truth = counted[number] + added, truth + added
        replicas[number].note(report(str(runs[number]), counted[number]))
        counts = sum_of_counts(each.total() for each in replicas)
        assert counts[("stats",)]["num_steps"] == truth
