"""The simulated fleet: every call ends where it was placed, and knowing the program pays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.scheduling.placement import ROUTINGS
from stemma.cli.parser import run_command
from stemma.planning.fleet_simulation import FleetSimulation
from stemma.planning.simulated_engine import SimulatedEngine
from stemma.planning.simulation import CPU
from stemma.planning.traces import TRACES


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_call_ends_and_no_page_is_lost(name: str) -> None:
    fleet = FleetSimulation([SimulatedEngine(CPU)] * 3, ROUTINGS[name])
    fleet.run(TRACES["react"](0, 60, 30.0))
    assert all(job.ended_s > job.started_s for job in fleet.jobs) and fleet.num_calls == 60
    for replica in fleet.replicas:
        replica.engine.scheduler.check()
        kv_cache = replica.engine.scheduler.kv_cache
        assert kv_cache.allocator.num_free + kv_cache.tree.num_pages == kv_cache.num_pages
        assert replica.load.num_calls == 0 and abs(replica.load.expected_tokens) < 1e-6
    again = FleetSimulation([SimulatedEngine(CPU)] * 3, ROUTINGS[name])
    again.run(TRACES["react"](0, 60, 30.0))
    assert again.now_s == fleet.now_s, "it depends on more than the seed"


def test_placing_programs_beats_placing_calls(tmp_path: Path) -> None:
    """Where agents come back to what they have said, in a pool that holds little more."""
    command = ["bench", "placement", "--replicas", "2", "--out", str(tmp_path)]
    command += ["--trace", "react", "--scale", "0.5"]
    for policy in ("round_robin a call", "prefix a call", "program"):
        command += ["--policy", policy]
    assert run_command(command) == 0
    rows = json.loads((tmp_path / "placement.json").read_text())["rows"]
    by_policy = {row["policy"]: row for row in rows}
    program, whole = by_policy["program"], by_policy["one cache"]
    assert program["wall s"] < 0.7 * by_policy["prefix a call"]["wall s"]
    assert program["hit rate"] > whole["hit rate"] - 0.03
