"""How a plan chooses between kinds of GPUs, by response surfaces that are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fleet_surfaces import surface_of

from stemma.planning.cells import Pool
from stemma.planning.fleet_plan import (
    FleetPlan,
    Option,
    PlannedPool,
    Wish,
    _combined,
    _exchanged,
    _first_options,
    _sized,
    good_alone,
    good_rate,
)
from stemma.planning.prices import GPU_HOUR
from stemma.planning.roles import Layout, Limits
from stemma.planning.simulated_engine import Chunking
from stemma.planning.trace_files import Text, Trace, TracedCall, TracedProgram
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL
from stemma.runtime.models.model_config import read_model_config

TOGETHER = Layout("together")
CALL = TracedCall((Text(100),), 50)


def wish_of(rate: float) -> Wish:
    """A minute at so many calls a second."""
    programs = tuple(TracedProgram(n / rate, "", ((CALL,),)) for n in range(round(60 * rate)))
    config, trace = read_model_config(EMBEDDED_MODEL), Trace("t", programs)
    return Wish(config, {"h200": 100, "l4": 100}, trace, Limits(0.5, 0.05), 0.9, GPU_HOUR)


def pool_of(gpu: str, limit: float, price: float, seconds: float) -> PlannedPool:
    option = Option(gpu, 1, TOGETHER, 2)
    surface = surface_of(limit)
    pool = Pool(gpu, surface, 100, seconds, 100_000, price / 3600)
    good = good_rate(surface, Limits(0.5, 0.05), 0.9)
    return PlannedPool(option, pool, 100, good)


def plan_at(rate: float, dollars: float = 3.6) -> FleetPlan:
    cheap, dear = pool_of("l4", 2.0, 0.7, 4e-4), pool_of("h200", 8.0, dollars, 1e-4)
    return _sized(wish_of(rate), [cheap, dear], 1.0)


def test_the_cheapest_calls_come_first_and_no_more_than_are_needed() -> None:
    (few,) = plan_at(70.0).pools
    assert few.option.gpu == "l4" and 35 <= few.num_replicas <= 60
    plan = plan_at(500.0)
    cheap, dear = plan.pools
    assert cheap.num_replicas > 95 and 36 <= dear.num_replicas < 100
    assert cheap.share == pytest.approx(1 / (1 + 4 * dear.num_replicas / cheap.num_replicas))
    assert min(each.busy for each in plan.figures.pools) > 0.5, "each has its share of the work"


def test_replicas_are_exchanged_for_others_that_do_for_less() -> None:
    def is_good(numbers: Sequence[int], wanted: int = 23) -> bool:
        return 10 * numbers[0] + 3 * numbers[1] >= wanted

    assert _exchanged((3, 0), (5, 5), (10.0, 4.0), is_good) == (2, 1)
    assert _exchanged((3, 0), (5, 5), (10.0, 11.0), is_good) == (3, 0), "that would cost more"
    assert _exchanged((3, 0), (5, 0), (10.0, 4.0), is_good) == (3, 0), "there are none"
    assert _exchanged((5, 5), (5, 5), (10.0, 1.0), is_good) == (1, 5), "some are too many"


def test_what_all_together_cannot_serve_is_said() -> None:
    pools = [pool_of("l4", 2.0, 0.7, 4e-4)]
    plan = _sized(wish_of(400.0), pools, 1.0)
    assert not plan.is_enough and plan.pools[0].num_replicas == 100
    assert plan.figures.good_share < 0.9


def test_a_rate_is_good_while_enough_calls_are() -> None:
    surface = surface_of(10.0)  # TTFT 0.1 + 0.4 share^2, a third of the calls 1.2 times that
    assert good_rate(surface, Limits(0.2, 1.0), 0.9) == pytest.approx(4.0)
    assert good_rate(surface, Limits(1.0, 1.0), 0.9) == pytest.approx(9.5)
    assert good_rate(surface, Limits(0.01, 1.0), 0.9) == 0.0


def test_groups_on_which_calls_are_late_even_alone_are_not_simulated() -> None:
    """A step of an L4 takes longer than some limits allow, whatever the load."""
    wish = wish_of(1.0)
    step_s = wish.device("l4", 1).rows_s([(1, 1)], 1)
    for tpot_s, share in ((1.01 * step_s, 1.0), (0.99 * step_s, 0.0)):
        tight = replace(wish, limits=Limits(0.5, tpot_s))
        assert good_alone(tight, wish.device("l4", 1)) == share
    fast_s = wish.device("h200", 1).rows_s([(1, 1)], 1)
    options, why_not = _first_options(replace(wish, limits=Limits(0.5, (fast_s + step_s) / 2)))
    assert {each.gpu for each in options} == {"h200"} and set(why_not) == {"l4"}


def test_features_that_pay_by_themselves_are_combined_and_roles_are_not() -> None:
    one = Option("h200", 1, TOGETHER, 2, calls_s=10.0)
    options = [
        one,
        Option("h200", 1, Layout("steps", 0, Chunking(512, 0.0)), 2, calls_s=10.1),
        Option("h200", 1, TOGETHER, 2, host_tokens=1000, calls_s=12.0),
        Option("h200", 1, TOGETHER, 2, acceptance=0.6, calls_s=13.0),
        Option("h200", 1, Layout("1 prefill", 1), 4, calls_s=20.0),
        Option("h200", 2, TOGETHER, 2, acceptance=0.0, calls_s=9.0),
    ]
    found = _combined(options, one)
    assert (found.layout, found.host_tokens, found.acceptance) == (TOGETHER, 1000, 0.6)
