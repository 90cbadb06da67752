"""Policy `program`: order by attained service, the working set, gangs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import pytest
from engine_harness import EngineHarness, assert_right
from fakes import FakeListener
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.planning.simulation import CPU, Simulation
from stemma.planning.traces import TRACES
from stemma.radix.leases import Lease
from stemma.runtime.schedule.plan import Row, StepPlan, StepResult
from stemma.runtime.schedule.program_record import LEVEL_FACTOR, LEVEL_SERVICE, ProgramRecord
from stemma.runtime.schedule.queue.admission import MAX_HELD_BACK
from stemma.runtime.schedule.queue.policy import POLICY_NAMES
from stemma.runtime.schedule.queue.step_costs import LOAD_MEMORY_S, StepCosts
from stemma.runtime.schedule.queue.working_set import ContextSizes
from stemma.runtime.schedule.request import FinishReason, Request

STEP_S, TOKEN_S = 0.001, 0.001


@dataclass
class TimedHouse(EngineHarness):
    """A clock of its own: a step takes `STEP_S`, and `TOKEN_S` for each token."""

    now_s: float = 0.0
    programs: list[ProgramRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = lambda: self.now_s
        super().__post_init__()
        scripted = self.executor.execute

        def timed(plan: StepPlan) -> StepResult:
            duration_s = STEP_S + TOKEN_S * plan.num_tokens
            self.now_s += duration_s
            return replace(scripted(plan), duration_s=duration_s)

        self.executor.execute = timed  # type: ignore[method-assign]

    def program(self, **fields: Any) -> ProgramRecord:
        self.programs.append(ProgramRecord(label=str(len(self.programs)), **fields))
        return self.programs[-1]

    def keep(self, token_ids: list[int], due_s: float = 1.0) -> Lease:
        kv_cache = self.engine.scheduler.kv_cache
        lease = kv_cache.retain("", token_ids, due_s=due_s, ttl_s=1000.0)
        assert lease is not None
        return lease

    def be_busy(self) -> None:
        """As if the device had had no time to spare for a while."""
        costs = self.engine.scheduler.costs
        costs._load_s, costs._load_at_s = LOAD_MEMORY_S, self.now_s


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 8) for _ in range(length)]


# --- order ----------------------------------------------------------------------------------------


def test_a_level_has_four_times_the_service_of_the_one_below() -> None:
    program = ProgramRecord()
    for level in range(5):
        program.service = LEVEL_SERVICE * LEVEL_FACTOR**level - 1
        assert program.level == level
        program.service += 1
        assert program.level == level + 1


def test_the_program_that_has_had_least_is_admitted_first() -> None:
    harness = EngineHarness(max_running=1)
    order: list[Request] = []
    for service in (20.0 * LEVEL_SERVICE, 0.0, 2.0 * LEVEL_SERVICE, None):
        program = None if service is None else ProgramRecord(service=service)
        listener = FakeListener(when_finished=order.append)
        harness.submit(prompt_of(len(order), 5), program=program, listener=listener)
    harness.run()
    assert [harness.requests.index(request) for request in order] == [1, 3, 2, 0]


@pytest.mark.parametrize("is_one", [False, True])
def test_the_longest_chain_of_calls_is_begun_first(is_one: bool) -> None:
    """Between programs, and between the calls of one."""
    harness = EngineHarness(max_running=1)
    order: list[Request] = []
    program = ProgramRecord()
    for num_calls_after in (1, 0, 3, 2):
        listener = FakeListener(when_finished=order.append)
        program = program if is_one else ProgramRecord()
        harness.submit(
            prompt_of(9, 5), program=program, num_calls_after=num_calls_after, listener=listener
        )
    harness.run()
    assert [harness.requests.index(request) for request in order] == [2, 3, 0, 1]


def test_all_tokens_that_a_programs_calls_compute_are_its_service() -> None:
    harness = EngineHarness()
    program = ProgramRecord()
    for seed in (1, 2):
        harness.submit(prompt_of(seed, 20), max_tokens=1, program=program)
    harness.run()
    assert program.service == 40
    harness.submit(prompt_of(1, 20), max_tokens=3, program=program)
    harness.run()
    assert program.service == 40 + 3 * harness.engine.scheduler.costs.row_tokens


def test_children_of_a_fork_start_together_and_compute_what_they_share_once() -> None:
    """Though children of three forks came by turns."""
    harness = EngineHarness(num_pages=400, max_running=4, token_budget=64)
    common, programs = prompt_of(1, 30), [ProgramRecord() for _ in range(3)]
    for index in range(12):
        fork, child = index % 3, index // 3
        own = [fork + 1, *prompt_of(fork, 9), child + 1]
        harness.submit([*common, *own], max_tokens=3, program=programs[fork])
    harness.run()
    first_plans: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for number, plan in enumerate(harness.executor.plans):
        for row in plan.rows:
            if row.start + len(row.input_ids) == len(common) + 11:
                first_plans[(row.request_id - 1) % 3].add(number)
    assert [len(numbers) for numbers in first_plans.values()] == [1, 1, 1]
    assert harness.executor.num_computed == 30 + 3 * 10 + 12 * (1 + 2)
    for request in harness.requests:
        assert_right(request)


# --- the working set ------------------------------------------------------------------------------


def begun(harness: TimedHouse, seed: int, length: int = 20) -> list[int]:
    """A program that has had a call and is now elsewhere; its context."""
    request = harness.submit(prompt_of(seed, length), max_tokens=2, program=harness.program())
    harness.run()
    context = list(request.token_ids)
    harness.keep(context[:-1])
    return context


def test_a_new_program_waits_for_room_that_others_lease_while_the_device_is_busy() -> None:
    harness = TimedHouse(num_pages=64)
    contexts = [begun(harness, seed) for seed in (1, 2)]
    harness.be_busy()
    new = harness.submit(prompt_of(3, 30), program=harness.program())
    harness.step()
    assert not new.is_admitted
    assert harness.engine.scheduler.stats.num_gated == 1
    back = harness.submit([*contexts[0], 1, 2], max_tokens=1, program=harness.programs[0])
    harness.step()
    assert back.is_finished and back.num_cached_tokens >= 20
    assert not new.is_admitted


def test_a_gated_program_is_admitted_when_a_lease_is_released() -> None:
    harness = TimedHouse(num_pages=64)
    begun(harness, 1)
    lease = harness.keep(begun(harness, 2))
    harness.be_busy()
    new = harness.submit(prompt_of(3, 30), program=harness.program())
    harness.step()
    assert not harness.engine.has_work
    for kept in list(harness.engine.scheduler.kv_cache.leases._active):
        harness.engine.scheduler.kv_cache.release_lease(kept)
    assert lease.node is None and harness.engine.has_work
    harness.run()
    assert_right(new)


def test_a_gated_loop_sleeps_until_the_device_has_had_time_to_spare() -> None:
    harness = TimedHouse(num_pages=64)
    for seed in (1, 2):
        begun(harness, seed)
    harness.be_busy()
    new = harness.submit(prompt_of(3, 30), program=harness.program())
    harness.step()
    engine = harness.engine
    wake_s = engine.next_wake_s
    assert not engine.has_work and wake_s is not None
    assert 0 < wake_s - harness.now_s < LOAD_MEMORY_S
    harness.now_s = wake_s
    assert engine.has_work
    harness.run()
    assert_right(new)


@pytest.mark.parametrize("num_tenants", [1, 200])
def test_a_crowd_at_the_gate_holds_up_no_step_and_nobody_who_may_pass(num_tenants: int) -> None:
    harness = TimedHouse(num_pages=64)
    contexts = [begun(harness, seed) for seed in (1, 2)]
    harness.be_busy()
    scheduler = harness.engine.scheduler
    crowd = [
        harness.submit(
            prompt_of(3 + number, 30), program=harness.program(tenant=number % num_tenants)
        )
        for number in range(200)
    ]
    welcome = harness.submit([*contexts[0], 1, 2], max_tokens=1, program=harness.programs[0])
    for _ in range(200 // (MAX_HELD_BACK - 1) + 2):
        before = scheduler.stats.num_gated
        assert harness.engine.has_work or welcome.is_finished
        harness.step()
        assert scheduler.stats.num_gated - before <= MAX_HELD_BACK
    assert welcome.is_finished and not any(request.is_admitted for request in crowd)
    assert not harness.engine.has_work and harness.engine.next_wake_s is not None
    before, scheduler._is_stalled = scheduler.stats.num_gated, False
    harness.step()
    assert scheduler.stats.num_gated == before + 1, "all are asked again"
    for request in crowd:
        harness.engine.abort(request)


def test_a_new_program_joins_while_the_device_has_time_to_spare() -> None:
    harness = TimedHouse(num_pages=64)
    for seed in (1, 2):
        begun(harness, seed)
    harness.now_s += 100.0
    new = harness.submit(prompt_of(3, 30), program=harness.program())
    harness.run()
    assert_right(new)
    assert harness.engine.scheduler.stats.num_gated == 0


def test_a_short_program_passes_long_ones_that_hold_the_pool() -> None:
    harness = TimedHouse(num_pages=64)
    for seed in (1, 2):
        begun(harness, seed)
    for program in harness.programs:
        program.service = 100.0 * LEVEL_SERVICE
    harness.be_busy()
    new = harness.submit(prompt_of(3, 30), program=harness.program())
    harness.step()
    assert new.is_admitted


def test_room_is_kept_for_what_begun_programs_are_expected_to_grow_to() -> None:
    harness = TimedHouse(num_pages=64)
    sizes = harness.engine.scheduler.working_set.contexts
    begun(harness, 1, 10)
    sizes.note(ProgramRecord(num_context_tokens=40))
    harness.be_busy()
    new = harness.submit(prompt_of(3, 10), max_tokens=2, program=harness.program())
    harness.step()
    assert not new.is_admitted  # both would become 40 tokens long


def test_contexts_grow_as_longer_ones_did() -> None:
    sizes = ContextSizes()
    assert sizes.growth("a", 5) == 0
    for size in (10, 20, 60):
        sizes.note(ProgramRecord(tenant="a", num_context_tokens=size))
    assert sizes.growth("a", 5) == 25
    assert sizes.growth("a", 10) == 30
    assert sizes.growth("a", 60) == sizes.growth("b", 5) == 0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_request_ends_whatever_programs_lease_and_policies_change(
    data: st.DataObject,
) -> None:
    """Also those behind a closed gate; nobody's output changes and nothing is leaked."""
    harness = TimedHouse(num_pages=90, max_running=4, is_hopeful=data.draw(st.booleans()))
    contexts: list[tuple[ProgramRecord, list[int]]] = []
    leases: list[Lease | None] = []
    for _ in range(data.draw(st.integers(5, 25))):
        kind = data.draw(st.sampled_from(["new", "back", "step", "lease", "release", "policy"]))
        if kind == "new":
            context = prompt_of(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 40)))
            contexts.append((harness.program(), context))
        if kind in ("new", "back") and contexts:
            program, context = data.draw(st.sampled_from(contexts))
            harness.submit(context, max_tokens=data.draw(st.integers(1, 6)), program=program)
        elif kind == "step":
            harness.step()
            if data.draw(st.booleans()):
                harness.be_busy()
        elif kind == "lease" and contexts:
            ids = data.draw(st.sampled_from(contexts))[1]
            kv_cache = harness.engine.scheduler.kv_cache
            leases.append(kv_cache.retain("", ids, due_s=1.0, ttl_s=1000.0))
        elif kind == "release" and leases:
            lease = leases.pop()
            if lease is not None:
                harness.engine.scheduler.kv_cache.release_lease(lease)
        elif kind == "policy":
            harness.engine.scheduler.policy = data.draw(st.sampled_from(POLICY_NAMES))
    run_to_the_end(harness)
    for request in harness.requests:
        assert_right(request)
        assert request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
    harness.engine.scheduler.kv_cache.leases.release_all()
    harness.assert_nothing_held()


def run_to_the_end(harness: TimedHouse) -> None:
    """No step is empty but one that is followed by a sleep."""
    for _ in range(5000):
        if not harness.engine.has_work:
            wake_s = harness.engine.next_wake_s
            if wake_s is None:
                return
            harness.now_s = max(harness.now_s, wake_s)
        harness.step()
    raise AssertionError(f"still busy: {harness.engine.describe()}")


def test_a_gated_program_is_overtaken_no_more_often_than_the_bound() -> None:
    harness = TimedHouse(num_pages=64, max_running=2)
    harness.engine.scheduler.waiting._max_overtakes = 5
    context = begun(harness, 1, 30)
    harness.be_busy()
    new = harness.submit(prompt_of(3, 40), max_tokens=1, program=harness.program())
    num_overtakes = 0
    while not new.is_admitted:
        harness.be_busy()
        harness.submit([*context[:-1], 1], max_tokens=1, program=harness.programs[0])
        harness.step()
        num_overtakes += 1
        assert num_overtakes <= 5 + 3
    run_to_the_end(harness)
    assert num_overtakes > 3


# --- costs ----------------------------------------------------------------------------------------


def test_costs_of_rows_and_tokens_are_learned_from_the_steps_times() -> None:
    costs = StepCosts()
    for num_rows in (1, 4, 9, 16, 2, 25):
        rows = tuple(Row(i, i, 50, (1,)) for i in range(num_rows))
        costs.note(StepPlan(1, rows), 0.004 + 0.0005 * num_rows, 0.0)
        chunk = Row(99, 99, 0, (1,) * 100)
        costs.note(StepPlan(1, (*rows, chunk)), 0.004 + 0.0005 * num_rows + 0.03, 0.0)
    assert costs.decode_row_s == pytest.approx(0.0005)
    assert costs.prompt_token_s == pytest.approx(0.0003, rel=0.2)


def test_the_load_fades_and_says_when_it_will_be_low() -> None:
    costs = StepCosts()
    chunk = StepPlan(1, (Row(1, 1, 0, (1,) * 1000),))
    for index in range(100):
        costs.note(chunk, 0.1, 0.1 * index)
    assert costs.load(9.9) == pytest.approx(1.0, abs=0.05)
    wait_s = costs.seconds_until(0.5, 9.9)
    assert costs.load(9.9 + wait_s) <= 0.5 < costs.load(9.9 + wait_s - 0.01)


# --- aborts ---------------------------------------------------------------------------------------


def test_thousands_of_waiting_requests_are_aborted_at_a_constant_cost_each() -> None:
    """Counted in what is compared or moved, not in seconds: no list of them is walked."""
    harness = EngineHarness(num_pages=64, max_running=1)
    requests = [harness.submit(prompt_of(i, 5), program=ProgramRecord()) for i in range(3000)]
    harness.step()
    line = harness.engine.scheduler.waiting
    for request in reversed(requests):
        harness.engine.abort(request)
    assert not line and not harness.engine.has_work
    harness.assert_nothing_held()


# --- targets (simulated time) ---------------------------------------------------------------------


def simulate(trace: str, policy: str, *, has_leases: bool) -> Simulation:
    load = CPU.loads[trace]
    assert load.num_tokens is not None
    device = replace(CPU, num_tokens=load.num_tokens)
    simulation = Simulation(device, policy=policy, has_programs=has_leases, has_leases=has_leases)
    simulation.run(TRACES[trace](0, load.num_requests, load.rate))
    return simulation


def num_recomputed(simulation: Simulation) -> int:
    return simulation.num_optimal_tokens - simulation.engine.scheduler.stats.num_cached_tokens


def test_agents_whose_contexts_do_not_fit_take_turns_instead_of_thrashing() -> None:
    others = [simulate("react", name, has_leases=False) for name in ("fcfs", "lpm", "dfs-weight")]
    ours = simulate("react", "program", has_leases=True)
    assert ours.now_s * 1.7 < min(other.now_s for other in others)
    assert num_recomputed(ours) * 5 < min(map(num_recomputed, others))
    cached = ours.engine.scheduler.stats.num_cached_tokens
    assert cached > 0.9 * ours.num_optimal_tokens  # so also of what a clairvoyant cache has


def test_short_programs_pass_long_ones() -> None:
    ours = simulate("mixed", "program", has_leases=True)
    fcfs = simulate("mixed", "fcfs", has_leases=False)

    def mean_s(simulation: Simulation) -> float:
        jobs = {id(r.job): r.job for r in simulation.records if r.call.client == "short"}
        return fmean(job.ended_s - job.started_s for job in jobs.values())

    def longest_s(simulation: Simulation) -> float:
        return max(job.ended_s - job.started_s for job in simulation.jobs)

    assert mean_s(ours) * 2 < mean_s(fcfs)
    assert longest_s(ours) < 1.2 * longest_s(fcfs)
