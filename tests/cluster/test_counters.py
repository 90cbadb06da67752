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


def report(uptime_s: float, num_steps: int, **fields: Any) -> dict[str, Any]:
    return {"uptime_s": uptime_s, "stats": {"num_steps": num_steps}, "host": None, **fields}


def steps(counters: ReplicaCounters) -> int:
    return int(counters.total()[("stats",)]["num_steps"])


def test_an_engine_that_started_later_counts_beside_those_before() -> None:
    counters = ReplicaCounters()
    counters.note(report(10.0, 100), now_s=1000.0)
    counters.note(report(20.0, 150), now_s=1010.0)
    assert steps(counters) == 150
    counters.note(report(3.0, 20), now_s=1020.0)
    assert steps(counters) == 170
    counters.note(report(13.0, 25), now_s=1030.0)
    assert steps(counters) == 175


def test_an_engine_that_is_found_again_counts_on() -> None:
    counters = ReplicaCounters()
    counters.note(report(10.0, 100), now_s=1000.0)
    counters.note(report(900.0, 130), now_s=1890.2)  # its connection was broken, it was not
    assert steps(counters) == 130


def test_what_only_some_reports_have_is_kept() -> None:
    counters = ReplicaCounters()
    ended = {"num_ended": {"stop": 3}, "histograms": {"h": {"bounds": [1, 2], "counts": [1, 2, 0]}}}
    counters.note(report(1.0, 1, requests=ended), now_s=10.0)
    counters.note(report(2.0, 2), now_s=11.0)
    counters.note(report(1.0, 5, requests=ended), now_s=20.0)
    twice = {"num_ended": {"stop": 6}, "histograms": {"h": {"bounds": [1, 2], "counts": [2, 4, 0]}}}
    assert counters.total()[("requests",)] == twice and steps(counters) == 7


def test_counts_stand_in_for_what_a_report_has_and_nothing_else() -> None:
    told = report(1.0, 1, leases={"num_broken": 2, "num_leases": 5}, lora={})
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
    started, counted = [0.0] * 3, [0] * 3
    now_s, before = 0.0, 0
    for _ in range(400):
        now_s += rng.uniform(0.1, 3.0)
        number = rng.randrange(3)
        if rng.random() < 0.2:
            started[number], counted[number] = now_s - rng.uniform(0.0, 0.05), 0
        counted[number] += rng.randrange(20)
        uptime_s = now_s - started[number]
        replicas[number].note(report(uptime_s, counted[number]), now_s + rng.uniform(0, 0.01))
        total = sum_of_counts(each.total() for each in replicas)[("stats",)]["num_steps"]
        assert total >= before
        before = total
