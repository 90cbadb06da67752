"""The benchmarks of simulated fleets: what they compare, and what studies find."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from stemma.__main__ import main
from stemma.bench.scheduling import fleet_studies
from stemma.bench.scheduling.fleet_studies import _apart, _leased, _routed, _routed_by_cells
from stemma.planning.mixes import MIXES


def test_it_holds_cells_against_exact_simulations(tmp_path: Path) -> None:
    sizes = ["--cell", "2", "--cell-calls", "30", "--exact", "3", "--seconds", "40", "--jobs", "1"]
    flags = ["--device", "l4", "--shares", "0.6", "--gpus", "1000", *sizes]
    assert main(["bench", "fleet", *flags, "--out", str(tmp_path), "--json"]) == 0
    rows = json.loads((tmp_path / "fleet.json").read_text())["rows"]
    found = {(row["case"], row["figure"]): row for row in rows}
    exactly = {figure: row for (case, figure), row in found.items() if "3 engines" in case}
    assert 0.5 < exactly["TPOT p50, ms"]["ratio"] < 2.0
    assert 0.5 < exactly["output tokens/s"]["ratio"] < 2.0
    large = {figure: row["cells"] for (case, figure), row in found.items() if "1000 GPUs" in case}
    assert large["million calls"] > 0.5 and large["s, computing"] > 0


def test_leases_keep_what_agents_come_back_for() -> None:
    without, leased = (_leased(0.2, 0, (1.0, is_on, False)) for is_on in (False, True))
    assert without["way"] == "neither" and leased["way"] == "leases"
    assert leased["hit rate"] > without["hit rate"] + 0.02


def test_programs_are_routed_better_than_calls() -> None:
    args = argparse.Namespace(seconds=6.0, seed=0, rate=3.5)
    by_call, by_program = (_routed(args, (4, way)) for way in ("round_robin a call", "program"))
    assert by_program["hit rate"] > by_call["hit rate"] + 0.1
    assert by_program["agent mean s"] < by_call["agent mean s"]


def test_cells_route_as_more_replicas_do_than_were_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_studies, "_CELL", 4)
    args = argparse.Namespace(seconds=12.0, seed=0, rate=3.0)
    by_call, by_program = (_routed_by_cells(args, way) for way in ("round_robin a call", "program"))
    exactly = _routed(args, (4, "program"))
    assert by_program["hit rate"] == pytest.approx(exactly["hit rate"], abs=0.05)
    assert by_program["agent mean s"] == pytest.approx(exactly["agent mean s"], rel=0.1)
    few = _routed(args, (4, "round_robin a call"))
    assert by_call["hit rate"] < few["hit rate"] - 0.1, "of many replicas none has an agent's KV"


def test_prompts_computed_elsewhere_keep_decode_steps_short() -> None:
    (code,) = [mix for mix in MIXES if mix.name == "code"]
    both, apart = (_apart(1.0, 0, (code, 8, number)) for number in (0, 2))
    assert both["elsewhere"] == 0 and both["busy, prefill"] is None
    assert apart["elsewhere"] > 0.5 and 0 < apart["busy, prefill"] < 1
    assert apart["TPOT p90, ms"] < both["TPOT p90, ms"]
    assert apart["good, 7 ms"] <= apart["good, 10 ms"] <= 1
