"""Fleets with roles, simulated: where prompts are computed, and which rate a search finds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

import pytest

from stemma.__main__ import main
from stemma.cluster.placement.policies import policy_of
from stemma.errors import InvalidRequest
from stemma.planning.devices import GPUS, Link
from stemma.planning.fleet_events import FleetEvents, Outage
from stemma.planning.fleet_simulation import CallTimes, FleetSimulation, Routing
from stemma.planning.mixes import MIXES, Mix, workload
from stemma.planning.roles import Fleet, Layout, Limits, Run, Search, layouts
from stemma.planning.roofline import CostModel
from stemma.planning.roofline_device import RooflineDevice
from stemma.planning.served_model import ServedModel
from stemma.planning.simulated_engine import SimulatedEngine
from stemma.planning.simulated_streams import Apart, SimulatedStreams
from stemma.planning.surface import ROUTING
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.memory.disk.block_key import BlockLayout
from stemma.runtime.memory.kv_layout import KVLayout
from stemma.runtime.models.model_config import read_model_config

TINY = CostModel(ServedModel.of(read_model_config(EMBEDDED_MODEL), "bfloat16"), GPUS["l4"])
FAST = Link("fast", 1e11, 1e-5)
FLEET = Fleet(RooflineDevice(TINY, 100_000, 64), 3, FAST)
LONG = workload(2000, 100, 16)


def run_of(fleet: Fleet, layout: Layout, mix: Mix = LONG, rate: float = 60.0) -> Run:
    return fleet.run(layout, mix, rate, seed=0, duration_s=3.0)


@pytest.mark.parametrize("layout", layouts(3), ids=lambda each: each.name)
def test_every_call_ends_whoever_computes_its_prompt(layout: Layout) -> None:
    run = run_of(FLEET, layout)
    assert run.num_calls == len(run.times) > 50
    assert all(t.asked_s < t.first_s <= t.ended_s for t in run.times)
    assert (run.num_asked > 0) == bool(layout.num_prefill)
    if layout.num_prefill:
        assert run.hidden is not None and 0.5 < run.hidden < 1.0
        assert min(run.busy) > 0.0, "an engine had nothing to do"


def test_failures_beside_roles_are_refused_by_name() -> None:
    kv = KVLayout.of(TINY.model.config, "bfloat16")
    streams = SimulatedStreams(Apart(1, FAST, BlockLayout("", "", kv)), 2)
    engines = [SimulatedEngine(FLEET.device)] * 2
    events = FleetEvents(outages=(Outage(0, 1.0),))
    with pytest.raises(InvalidRequest, match=r"events=.*none beside roles; simulate failures of"):
        FleetSimulation(engines, ROUTING, streams=streams, events=events)


def test_a_link_that_is_too_slow_is_not_used() -> None:
    layout = Layout("", num_prefill=2)
    slow = replace(FLEET, link=Link("slow", 2e7, 1e-5))
    assert run_of(slow, layout).num_asked < run_of(FLEET, layout).num_asked / 4


@pytest.mark.parametrize("mix", MIXES, ids=lambda each: each.name)
def test_a_mix_has_the_calls_that_its_rate_says(mix: Mix) -> None:
    run = run_of(FLEET, Layout(""), mix, rate=20.0)
    assert run.num_all == pytest.approx(60, rel=0.35)


def test_calls_that_count_take_as_long_in_a_run_that_ends_with_them() -> None:
    chat, times, ends = MIXES[0], [], []
    for counted_s in (2.0, inf):
        fleet = FleetSimulation(
            [SimulatedEngine(FLEET.device)] * 2, Routing(lambda: policy_of("program"))
        )
        fleet.run(chat.starts(0, 40.0, 2.0), counted_s=counted_s)
        times.append([each for each in fleet.times if each.asked_s < 2.0])
        ends.append(fleet.now_s)
    assert times[0] == times[1]
    assert ends[0] == max(each.ended_s for each in times[0]) < ends[1]


@dataclass(frozen=True)
class Known:
    """A fleet of which each call is good up to a rate of 10, and none from 20 on."""

    rates: list[float]

    def run(self, layout: Layout, mix: Mix, rate: float, **_: Any) -> Run:
        self.rates.append(rate)
        bad = min(100, max(0, round(100 * (rate / 10 - 1))))
        times = [CallTimes(0.0, 1.0, 2.0, 2)] * (100 - bad) + [CallTimes(0.0, 9.0, 9.0, 1)] * bad
        return Run(rate, 100, 100, times, [], 0, None)


@pytest.mark.parametrize("first_rate", [0.1, 10.0, 300.0])
def test_a_search_finds_the_rate_wherever_it_starts(first_rate: float) -> None:
    fleet = Known([])
    search = Search(cast(Fleet, fleet), Layout(""), LONG, first_rate=first_rate, duration_s=1.0)
    for share, rate in ((0.9, 11.0), (0.5, 15.0)):
        assert search.goodput(Limits(1.0, 1.0), share).rate == pytest.approx(rate, rel=0.04)
    assert search.goodput(Limits(0.5, 1.0), 0.9).rate == 0.0, "the first token takes a second"
    assert len(fleet.rates) == len(set(fleet.rates)), "a rate was simulated twice"


def test_a_rate_below_the_least_one_is_not_searched_for() -> None:
    for least, rate, num_runs in ((14.0, 0.0, 1), (9.0, 11.0, 4)):
        fleet = Known([])
        search = Search(cast(Fleet, fleet), Layout(""), LONG, first_rate=0.1, duration_s=1.0)
        found = search.goodput(Limits(1.0, 1.0), 0.9, least)
        assert found.rate == pytest.approx(rate, rel=0.04)
        assert len(fleet.rates) <= num_runs


def test_plan_says_how_many_engines_compute_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--prompt-tokens", "300", "--output-tokens", "4", "--clients", "1"]
    limits = ["--ttft-ms", "10", "--tpot-ms", "2"]
    flags = ["plan", "--device", "l4", "--engines", "2", *load, *limits, "--json"]
    assert main(flags) == 0
    rows = {row["engines"]: row for row in json.loads(capsys.readouterr().out)["roles"]}
    assert list(rows) == [layout.name for layout in layouts(2)]
    assert rows["1 prefill, 1 decode"]["flags"] == "--replicas 2 --prefill-replicas 1"
    assert all(row["calls/s"] > 0 for row in rows.values())
    assert main([*flags, "--tpot-ms", "0"]) == 1
    assert "tpot_ms=0" in capsys.readouterr().err
