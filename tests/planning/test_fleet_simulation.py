"""A simulated fleet's invariants: what fails, is slow, comes or goes loses and invents nothing."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.cluster.placement.policies import policy_of
from stemma.planning.fleet_events import (
    NO_EVENTS,
    Autoscaling,
    FleetEvents,
    Outage,
    Slowdown,
    random_outages,
)
from stemma.planning.fleet_simulation import FleetSimulation, Routing
from stemma.planning.simulated_engine import SimulatedEngine
from stemma.planning.simulation import CPU
from stemma.planning.traces import TRACES, Start
from stemma.runtime.schedule.plan import StepPlan
from stemma.runtime.schedule.scheduler import Scheduler

DEVICE = replace(CPU, num_tokens=6_000, max_running_requests=16)
FAST = replace(
    DEVICE, fixed_ms=1.0, prefill_token_ms=0.05, decode_row_ms=0.1, max_running_requests=32
)
ENGINE = SimulatedEngine(DEVICE)
PROGRAM = Routing(lambda: policy_of("program"))


def run_of(
    engines: list[SimulatedEngine],
    *,
    routing: Routing = PROGRAM,
    events: FleetEvents = NO_EVENTS,
    trace: str = "react",
    num_requests: int = 48,
    rate: float = 8.0,
    seed: int = 0,
) -> FleetSimulation:
    """A trace to its end, whose engines' books are in order."""
    fleet = FleetSimulation(engines, routing, seed=seed, events=events)
    fleet.run(TRACES[trace](seed, num_requests, rate))
    for replica in fleet.replicas:
        assert not replica.calls, "a call is left"
        replica.engine.scheduler.check()
    return fleet


def asked(trace: str, num_requests: int, rate: float, seed: int) -> tuple[int, int]:
    """Calls of a trace, and tokens that they are to generate."""
    num_calls = num_tokens = 0
    for start in TRACES[trace](seed, num_requests, rate):
        calls = next(start.job, None)
        while calls is not None:
            num_calls += len(calls)
            num_tokens += sum(call.num_output for call in calls)
            outputs = [call.prompt[: call.num_output] for call in calls]
            try:
                calls = start.job.send(outputs)
            except StopIteration:
                calls = None
    return num_calls, num_tokens


outages = st.lists(
    st.builds(
        lambda replica, at_s, away_s: Outage(replica, at_s, at_s + away_s),
        st.integers(0, 2),
        st.floats(0.0, 12.0),
        st.floats(0.1, 20.0),
    ),
    max_size=5,
)


@given(
    outages,
    st.sampled_from(["react", "chats", "forks"]),
    st.booleans(),
    st.sampled_from([0.0, 0.7]),
    st.sampled_from([0, 4_000]),
    st.integers(0, 3),
)
@settings(max_examples=12, deadline=None)
def test_no_token_is_lost_or_made_twice_whoever_fails(
    failures: list[Outage], trace: str, by_call: bool, acceptance: float, host: int, seed: int
) -> None:
    engine = replace(ENGINE, acceptance=acceptance, host_tokens=host)
    fleet = run_of(
        [engine] * 3,
        routing=replace(PROGRAM, by_call=by_call),
        events=FleetEvents(outages=tuple(failures)),
        trace=trace,
        num_requests=24,
        seed=seed,
    )
    num_calls, num_tokens = asked(trace, 24, 8.0, seed)
    assert (len(fleet.times), fleet.num_output_tokens) == (num_calls, num_tokens)
    assert all(each.asked_s < each.first_s <= each.ended_s for each in fleet.times)
    ends = [each.ended_s for each in fleet.times]
    assert ends == sorted(ends), "an end came before an earlier one"


def left_by(fleet: FleetSimulation) -> list[object]:
    """All that a run shows, and leaves in its engines, but for the numbers of pages."""
    left: list[object] = [fleet.times, fleet.asked_s, fleet.now_s, fleet.hit_rate]
    for replica in fleet.replicas:
        scheduler = replica.engine.scheduler
        tree, stats = scheduler.kv_cache.tree, scheduler.stats
        kept = [(node.start, node.token_ids) for node in tree.use_order]
        costs, programs = scheduler.costs, [job.program.service for job in fleet.jobs]
        left += [replica.busy_s, kept, programs, costs.describe(), costs.load(fleet.now_s)]
        left += [costs.decode_step_s, scheduler.new_tokens.ratio]
        left += [getattr(stats, name) for name in stats.__slots__]
    return left


@given(
    outages,
    st.sampled_from(["react", "chats", "forks", "full"]),
    st.booleans(),
    st.sampled_from([2_500, 6_000, 40_000]),
    st.integers(0, 3),
)
@settings(max_examples=12, deadline=None)
def test_steps_that_are_made_at_once_are_those_that_were_made_one_by_one(
    failures: list[Outage], trace: str, by_call: bool, num_tokens: int, seed: int
) -> None:
    engine = replace(ENGINE, device=replace(DEVICE, num_tokens=num_tokens))
    slow = (Slowdown(0, 1.0, 5.0, 3.0),)
    routing = replace(PROGRAM, by_call=by_call, moves=not by_call)
    events = FleetEvents(tuple(failures), slow)

    def run() -> FleetSimulation:
        return run_of(
            [engine] * 3, routing=routing, events=events, trace=trace, num_requests=24, seed=seed
        )

    at_once = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "steady_rows", lambda self: ())
        one_by_one = run()
    assert left_by(at_once) == left_by(one_by_one)


def test_most_steps_of_long_answers_are_made_at_once() -> None:
    num_planned = 0

    def counted(self: Scheduler) -> StepPlan | None:
        nonlocal num_planned
        num_planned += 1
        return plan(self)

    plan = Scheduler.plan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "plan", counted)
        fleet = run_of([replace(ENGINE, device=replace(DEVICE, num_tokens=40_000))], trace="chats")
    num_steps = fleet.replicas[0].engine.scheduler.stats.num_steps
    assert num_planned < num_steps / 2


def test_calls_of_a_replica_that_ends_go_on_behind_their_last_token() -> None:
    calm = run_of([ENGINE] * 3)
    stormy = run_of([ENGINE] * 3, events=FleetEvents(outages=(Outage(0, 2.0), Outage(1, 4.0, 6.0))))
    assert stormy.num_resumed > 0
    assert stormy.num_output_tokens == calm.num_output_tokens
    assert stormy.now_s > calm.now_s
    assert stormy.replicas[0].paid_s == pytest.approx(2.0), "what is gone for good is not paid for"
    assert stormy.replicas[1].paid_s == pytest.approx(stormy.now_s - 2.0)


def test_calls_wait_while_nobody_is_there() -> None:
    away = FleetEvents(outages=tuple(Outage(n, 0.5, 30.0) for n in range(2)))
    fleet = run_of([ENGINE] * 2, events=away)
    late = [each for each in fleet.times if each.asked_s > 0.5]
    assert late and all(each.ended_s > 30.0 for each in late)


def test_a_straggler_is_given_less() -> None:
    slow = FleetEvents(slowdowns=(Slowdown(0, 0.0, inf, 6.0),))
    fleet = run_of([ENGINE] * 2, events=slow, num_requests=96)
    calm = run_of([ENGINE] * 2, num_requests=96)
    assert fleet.now_s > calm.now_s
    tokens = [replica.prompt_tokens for replica in fleet.replicas]
    assert tokens[0] < 0.8 * tokens[1]


def test_a_faster_engine_is_given_more() -> None:
    fleet = run_of([ENGINE, SimulatedEngine(FAST)], num_requests=96)
    assert fleet.replicas[1].prompt_tokens > 1.3 * fleet.replicas[0].prompt_tokens
    alike = run_of([ENGINE] * 2, num_requests=96)
    assert fleet.now_s < alike.now_s


def test_replicas_come_and_go_as_they_are_wanted() -> None:
    rule = Autoscaling(1, 4, target_calls=4.0, up_s=2.0, down_s=5.0, start_s=3.0)
    burst = TRACES["react"](0, 120, 20.0)
    late = [Start(60.0 + each.at_s, each.job) for each in TRACES["react"](1, 12, 0.1)]
    fleet = FleetSimulation([ENGINE] * 4, PROGRAM, events=FleetEvents(scaling=rule))
    fleet.run([*burst, *late])
    assert len(fleet.times) == 132
    used = [replica.prompt_tokens > 0 for replica in fleet.replicas]
    assert sum(used) >= 2, "nobody came"
    paid_s = sum(replica.paid_s for replica in fleet.replicas)
    assert fleet.now_s < paid_s < 2.5 * fleet.now_s, "nobody left"


def test_a_tier_in_the_host_s_memory_saves_what_it_holds() -> None:
    """Agents' KV that does not fit the device is copied back instead of being computed again."""
    tight = replace(ENGINE, device=replace(DEVICE, num_tokens=2_500))
    plain = run_of([tight] * 2, num_requests=120)
    tiered = run_of([replace(tight, host_tokens=30_000)] * 2, num_requests=120)
    assert tiered.hit_rate > plain.hit_rate + 0.02
    loaded = sum(
        host.num_loaded_tokens
        for replica in tiered.replicas
        if (host := replica.engine.scheduler.kv_cache.host) is not None
    )
    assert loaded > 0
    assert tiered.now_s < plain.now_s


def test_guesses_that_are_right_save_time_where_reading_weights_is_what_a_step_takes() -> None:
    lone = replace(ENGINE, device=replace(DEVICE, fixed_ms=40.0))
    plain = run_of([lone], num_requests=6)
    guessed = run_of([replace(lone, acceptance=0.9)], num_requests=6)
    wrong = run_of([replace(lone, acceptance=0.05)], num_requests=6)
    assert guessed.num_output_tokens == plain.num_output_tokens == wrong.num_output_tokens
    assert guessed.replicas[0].busy_s < 0.7 * plain.replicas[0].busy_s
    assert wrong.replicas[0].busy_s < 1.15 * plain.replicas[0].busy_s


def test_who_asked_first_is_answered_first_on_one_engine() -> None:
    """Calls that are alike, one row at a time: first come, first served."""
    alone = replace(ENGINE, device=replace(DEVICE, max_running_requests=1))
    fleet = run_of([alone], trace="full", num_requests=20, rate=50.0)
    firsts = [each.first_s for each in sorted(fleet.times, key=lambda each: each.asked_s)]
    assert firsts == sorted(firsts)


def test_random_outages_come_as_often_as_they_should() -> None:
    found = random_outages(200, 3600.0, mean_s=7200.0, repair_s=300.0, seed=1)
    assert len(found) == pytest.approx(200 * 3600 / 7500, rel=0.25)
    assert all(each.until_s - each.at_s == pytest.approx(300.0) for each in found)
