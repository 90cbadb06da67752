"""The schedule simulator: deterministic, complete, and telling the policies apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stemma.bench.scheduling.schedule import POLICIES, chunking_rows, row_of
from stemma.cli.parser import run_command
from stemma.planning.simulation import H200, Simulation
from stemma.planning.traces import TRACES

HOST = ("host us/req", "host us/step")


@pytest.mark.parametrize("trace", TRACES)
def test_a_seed_decides_everything_but_the_hosts_time(trace: str) -> None:
    rows = [row_of(H200, trace, "lpm", 3, 0.05, 16) for _ in range(2)]
    for row in rows:
        for name in HOST:
            assert row.pop(name) > 0  # type: ignore[operator]
    assert rows[0] == rows[1]
    assert rows[0] != row_of(H200, trace, "lpm", 4, 0.05, 16)
    assert rows[0]["hit rate"] <= rows[0]["optimum"]  # type: ignore[operator]


def test_every_call_of_a_trace_ends_with_all_its_tokens_and_no_page_held() -> None:
    simulation = Simulation(H200, policy="dfs-weight")
    simulation.run(TRACES["programs"](0, 200, 100.0))
    assert len(simulation.records) >= 100
    for record in simulation.records:
        assert len(record.token_times_s) == record.call.num_output
        assert record.ttft_s > 0
    simulation.engine.scheduler.check()
    kv_cache = simulation.engine.scheduler.kv_cache
    assert kv_cache.num_free_pages == kv_cache.num_pages


def test_aging_bounds_the_wait_of_cold_requests_under_a_flood() -> None:
    cold = {
        policy: row_of(H200, "flood", policy, 0, 0.3, 1)["cold ttft p99 ms"]
        for policy in ("fcfs", "lpm", "lpm without aging")
    }
    assert cold["lpm"] < 2 * cold["fcfs"]  # type: ignore[operator]
    assert cold["lpm without aging"] > 1.5 * cold["lpm"]  # type: ignore[operator]


def test_a_long_prompt_in_chunks_slows_decoding_by_less_than_twice() -> None:
    off, *chunked = [float(str(row["ratio while it runs"])) for row in chunking_rows(H200)]
    assert off > 10
    assert chunked and max(chunked) < 2


def test_the_command_writes_a_row_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "schedule", "--json", "--scale", "0.02", "--trace", "flood"]
    assert run_command([*command, "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in printed] == list(POLICIES)
    assert json.loads((tmp_path / "schedule.json").read_text())["rows"] == printed
