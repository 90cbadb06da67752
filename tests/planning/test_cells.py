"""A fleet by cells: what it is given is served or waits, and an exact fleet is met."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fleet_surfaces import surface_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.planning.cells import CellFleet, Failures, Pool
from stemma.planning.fleet_events import Autoscaling
from stemma.planning.fleet_simulation import FleetSimulation
from stemma.planning.mixes import Mix, workload
from stemma.planning.simulated_engine import SimulatedEngine
from stemma.planning.simulation import CPU
from stemma.planning.surface import ROUTING, Cell, Surface, quantile

ANY = {"ttft_s": 1.0, "tpot_s": 1.0}


def pool_of(
    number: int, limit: float = 10.0, prompt_token_s: float = 1e-4, price_s: float = 0.0
) -> Pool:
    return Pool("pool", surface_of(limit), number, prompt_token_s, 100_000, price_s)


@given(
    st.lists(st.floats(0.0, 2_000.0), min_size=1, max_size=40),
    st.integers(1, 200),
    st.integers(0, 100),
    st.sampled_from([Failures(), Failures(100.0, 50.0, 0.3, 3.0)]),
    st.integers(0, 5),
)
@settings(max_examples=60, deadline=None)
def test_every_call_is_served_or_waits(
    rates: list[float], number: int, other: int, failures: Failures, seed: int
) -> None:
    pools = [pool_of(number), *([pool_of(other, 3.0, 4e-4)] if other else [])]
    found = CellFleet(pools, 50.0, failures, seed).run(rates, **ANY)
    asked = 10.0 * sum(rates)
    assert found.num_calls == pytest.approx(asked, rel=1e-6, abs=1e-6)
    assert found.num_served <= asked * (1 + 1e-9) + 1e-6
    most = 10.0 * len(rates) * (number * 10.0 + other * 3.0)
    assert found.num_served <= most * (1 + 1e-9)
    if not failures.slow_share and max(rates) <= number * 10.0:
        assert found.num_served == pytest.approx(asked, rel=1e-6, abs=1e-6)
    assert 0.0 <= found.good_share <= 1.0 + 1e-9


def test_what_cannot_be_served_waits_and_is_late() -> None:
    fleet = CellFleet([pool_of(8)], 50.0)
    calm, busy = (fleet.run([rate] * 30, **ANY) for rate in (40.0, 120.0))
    assert calm.good_share == pytest.approx(1.0)
    assert busy.num_served == pytest.approx(80.0 * 300)
    assert busy.ttft_s[0.5] > 10.0
    burst = fleet.run([120.0] * 5 + [20.0] * 10, **ANY)
    assert burst.num_served == pytest.approx(burst.num_calls), "the queue is worked off"


def test_a_pool_with_a_share_of_its_own_does_what_it_does_alone() -> None:
    pools = [pool_of(10), pool_of(10, 5.0, 8e-4)]
    both = CellFleet(pools, 50.0, shares=[0.75, 0.25]).run([60.0] * 3, **ANY)
    alone = [CellFleet([pool], 50.0).run([rate] * 3, **ANY) for pool, rate in zip(pools, (45, 15))]
    assert [each.share for each in both.pools] == pytest.approx([0.75, 0.25])
    assert [each.busy for each in both.pools] == [each.pools[0].busy for each in alone]
    assert both.num_served == pytest.approx(sum(each.num_served for each in alone))


def test_the_router_gives_more_to_the_faster_until_both_expect_equally_long() -> None:
    pools = [pool_of(10), pool_of(10, 5.0, 8e-4)]
    idle, busy = (CellFleet(pools, 50.0).run([rate] * 3, **ANY) for rate in (10.0, 145.0))
    assert idle.pools[0].share == pytest.approx(1.0), "the slow ones would take eight times as long"
    assert 0.6 < busy.pools[0].share < 0.75


def test_fewer_replicas_are_paid_where_fewer_are_wanted() -> None:
    rule = Autoscaling(4, 40, target_calls=2.0, up_s=20.0, down_s=60.0, start_s=30.0)
    scaled = replace(pool_of(40, price_s=0.001), scaling=rule)
    rates = [30.0] * 30 + [300.0] * 30 + [30.0] * 60
    fixed = CellFleet([pool_of(40, price_s=0.001)], 50.0).run(rates, **ANY)
    found = CellFleet([scaled], 50.0).run(rates, **ANY)
    assert fixed.cost == pytest.approx(40 * 0.001 * 1200)
    assert 0.1 * fixed.cost < found.cost < 0.8 * fixed.cost
    assert found.num_served == pytest.approx(found.num_calls, rel=1e-3)


def test_failures_take_capacity() -> None:
    rates = [900.0] * 100
    calm = CellFleet([pool_of(100)], 50.0).run(rates, **ANY)
    failing = CellFleet([pool_of(100)], 50.0, Failures(1000.0, 500.0)).run(rates, **ANY)
    slow = CellFleet([pool_of(100)], 50.0, Failures(slow_share=0.5)).run(rates, **ANY)
    assert calm.num_served == pytest.approx(calm.num_calls)
    assert failing.num_served < 0.9 * failing.num_calls
    assert slow.num_served == pytest.approx(0.75 / 0.9 * slow.num_calls, rel=0.05)


def test_quantiles_count_by_weight() -> None:
    values = np.array([3.0, 1.0, 2.0])
    assert quantile(values, np.array([1.0, 8.0, 1.0]), 0.5) == 1.0
    assert quantile(values, np.ones(3), 0.99) == 3.0
    assert np.isnan(quantile(np.empty(0), np.empty(0), 0.5))


SMALL = replace(CPU, num_tokens=12_000, max_running_requests=32)
SHORT: Mix = workload(96, 64, 12)


def test_the_largest_rate_is_what_is_kept_up_with_wherever_it_is_looked_for() -> None:
    cell = Cell(SimulatedEngine(SMALL), SHORT, num_engines=2, num_calls=320, seed=1)
    from_below, from_above = (cell.largest_rate(rate) for rate in (10.0, 400.0))
    assert from_below == pytest.approx(from_above, rel=0.1)
    within, beyond = (cell.point(share * from_below) for share in (0.85, 1.3))
    assert within.keeps_up and not beyond.keeps_up
    assert beyond.served == pytest.approx(from_below, rel=0.1)


def test_cells_meet_the_exact_fleet_that_is_larger_than_what_they_learned_from() -> None:
    """Six engines from two, at a rate between those that were simulated."""
    engine = SimulatedEngine(SMALL)
    cell = Cell(engine, SHORT, num_engines=2, num_calls=160, seed=1)
    surface = Surface.learn(cell, cell.largest_rate(80.0))
    rate, duration_s = 0.55 * surface.limit * 6, 5.0
    fleet = FleetSimulation([engine] * 6, ROUTING)
    fleet.run(SHORT.starts(0, rate, duration_s), counted_s=duration_s)
    times = [each for each in fleet.times if each.asked_s >= 1.5]
    pool = Pool("", surface, 6, SMALL.prefill_token_ms / 1e3, SMALL.num_tokens)
    found = CellFleet([pool], 12.0).run([rate] * 3, **ANY)
    exact = np.array([(each.ttft_s, each.tpot_s) for each in times])
    assert found.output_tokens_s == pytest.approx(12.0 * rate, rel=1e-6)
    assert found.ttft_s[0.5] == pytest.approx(np.median(exact[:, 0]), rel=0.15)
    assert found.tpot_s[0.5] == pytest.approx(np.median(exact[:, 1]), rel=0.15)
    assert surface.rates == pytest.approx(sorted(surface.rates))
