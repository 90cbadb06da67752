"""Studies of simulated fleets: routing, leases and moves, roles, guesses, a region of agents.

    routing   policies by the number of replicas, of ReAct agents: programs' mean time
    leases    leases and moves of programs, as agents' tools take longer
    roles     engines that compute prompts for the others, by how many do, of three mixes
    guesses   tokens that are guessed and verified, by the load of the engines
    region    a million agents over a day: GPUs, dollars, and how late calls are

Each prints its table and writes a chart, NAME.svg, beside its report. Engines are the real ones
over modelled devices: two cores that run llama-160m for `routing` and `leases`, an H200 that runs
the shape of Llama-3.1-8B for the others.
"""

from __future__ import annotations

import argparse
import statistics
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import cos, pi
from random import Random
from typing import Any

import numpy as np

from ...cluster.placement.policies import policy_of
from ...flags import count
from ...planning.cells import CellFleet, Failures, Pool
from ...planning.charts import line_chart
from ...planning.devices import GPUS, links_of
from ...planning.fleet_events import Autoscaling
from ...planning.fleet_simulation import FleetSimulation, Routing
from ...planning.mixes import MIXES, Mix
from ...planning.prices import GPU_HOUR
from ...planning.roles import Fleet, Layout, Limits
from ...planning.simulated_engine import SimulatedEngine
from ...planning.simulation import CPU
from ...planning.surface import Cell, Surface, quantile
from ...planning.traces import Call, Job, Start
from ..cluster.roles import TTFT_S
from ..harness.fleet_device import device_of, engine_of
from ..harness.report import percentile, write_report
from .placement import ROUTINGS

_POLICIES = ("round_robin a call", "prefix a call", "round_robin", "program")
_BY_CELLS = ("round_robin a call", "round_robin", "program")
_THINK_S = (0.25, 1.0, 4.0, 16.0)
_LEASE_TOKENS = 6_000  # of KV: some twenty agents' contexts
_ENGINES = 8  # of the fleet with roles
_PREFILL = (0, 1, 2, 3, 4)  # of them; 0: each does both, prompts in chunks
_ROLE_RATES = {"chat": (10, 20), "rag": (2, 4), "code": (10, 20)}  # calls a second of an engine
_ROLE_TPOT_S = (0.007, 0.010)  # a decode step without any prompt takes some 5 ms
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_ACCEPTANCES = (0.0, 0.5, 0.7, 0.9)
_WARM_SHARE, _LATE_SHARE = 0.4, 0.7  # of a run's time: agents that begin between them count
_CELL = 64
_ROUTING_OUTPUT = 24  # tokens of a call
_OBSERVED = 96  # tokens a turn
_TOOL_S = 1.6  # that tools take, on average
_AGENTS = 1_000_000
_PAUSE_S = 5.0  # of an agent of the region, between two turns, on average
_TURNS = 6
_OUTPUT = 96  # tokens of a call
_ACTIVE = 0.02, 0.12  # of all agents, at night and in the afternoon
_SLOT_S = 60.0


@dataclass(frozen=True)
class Study:
    """What a study found: its rows, and its chart as SVG."""

    rows: Sequence[dict[str, Any]]
    chart: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench fleet-studies`."""
    add = parser.add_argument
    add("--study", choices=[*STUDIES], action="append", help="default: all")
    sizes = [8, 16, 32, 64, 128, 1000, 10_000]
    add("--replicas", type=count, nargs="+", default=sizes, help="of `routing`")
    add("--exact", type=count, default=128, help="replicas of it, by cells beyond (%(default)s)")
    add("--rate", type=float, default=3.5, help="calls a second of a replica of it (%(default)s)")
    add("--scale", type=float, default=0.25, help="agents of `leases` (%(default)s)")
    add("--cell-calls", type=count, default=400, help="of a run of a cell (%(default)s)")
    add("--seconds", type=float, default=24.0, help="of a run of `routing`, `roles` (%(default)s)")
    add("--seed", type=int, default=0)
    add("--jobs", type=count, default=2, help="processes (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Simulate, report and draw."""
    with ProcessPoolExecutor(args.jobs) as jobs:
        for name in args.study or STUDIES:
            study = STUDIES[name](args, jobs)
            write_report(f"fleet-{name}", study.rows, args)
            (args.out / f"{name}.svg").write_text(study.chart)
    return 0


# --- routing --------------------------------------------------------------------------------------


def routing(args: argparse.Namespace, jobs: ProcessPoolExecutor) -> Study:
    """Policies over more and more replicas, as busy whatever their number: exactly, and beyond
    `--exact` replicas by cells."""
    few = [number for number in args.replicas if number <= args.exact]
    many = [number for number in args.replicas if number > args.exact]
    cases = [(number, name) for number in few for name in _POLICIES]
    rows = list(jobs.map(partial(_routed, args), cases))
    if many:
        cells = jobs.map(partial(_routed_by_cells, args), _BY_CELLS)
        rows += [{**row, "replicas": number} for row in cells for number in many]
    lines: dict[str, list[tuple[float, float]]] = {name: [] for name in _POLICIES}
    for row in rows:
        lines[row["policy"]].append((row["replicas"], row["agent mean s"]))
    title = "An agent's time by the number of replicas"
    return Study(rows, line_chart(title, "replicas", "mean, s", lines, is_log_x=True))


def _routed(args: argparse.Namespace, case: tuple[int, str]) -> dict[str, Any]:
    """Of the agents that began between 0.4 and 0.7 of the time: most of them end within it."""
    number, name = case
    duration_s = args.seconds / (1 - _WARM_SHARE)
    fleet = FleetSimulation([_routing_engine()] * number, ROUTINGS[name], seed=args.seed)
    mix = Mix("agents", "six turns", _routing_agents, _TURNS)
    fleet.run(mix.starts(args.seed, args.rate * number, duration_s))
    begin_s, end_s = _WARM_SHARE * duration_s, _LATE_SHARE * duration_s
    counted = [job for job in fleet.jobs if begin_s <= job.started_s < end_s]
    return {
        "replicas": number,
        "policy": name,
        "how": "exactly",
        "agent mean s": statistics.mean(job.ended_s - job.started_s for job in counted),
        "hit rate": fleet.hit_rate,
    }


def _routed_by_cells(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """As each cell of a fleet of any size is, whose router spreads agents evenly over them. Where
    it places calls, and in turn, no replica of many gets two of an agent's: a cell of them has
    calls of as many agents."""
    mix = Mix("agents", "six turns", _routing_agents, _TURNS)
    routing = ROUTINGS[name]
    if routing.by_call:
        mix, routing = (
            Mix("calls", "one of an agent's six", _routing_calls),
            ROUTINGS["round_robin"],
        )
    num_calls = round(args.rate * _CELL * args.seconds)
    cell = Cell(_routing_engine(), mix, _CELL, num_calls, seed=args.seed + 1, routing=routing)
    point = cell.point(args.rate)
    return {
        "policy": name,
        "how": "by cells",
        "agent mean s": _TURNS * point.call_s + (_TURNS - 1) * _TOOL_S,
        "hit rate": point.hit_rate,
    }


def _routing_engine() -> SimulatedEngine:
    load = CPU.loads["react"]
    return SimulatedEngine(replace(CPU, num_tokens=load.num_tokens or CPU.num_tokens))


def _routing_agents(rng: Random) -> Callable[[Random], Job]:
    common = _drawn(rng, 384)
    return lambda rng: _agent(rng, common, _TOOL_S, _TURNS)


def _routing_calls(rng: Random) -> Callable[[Random], Job]:
    common = _drawn(rng, 384)
    return lambda rng: _nth_call(rng, common)


def _nth_call(rng: Random, common: array[int]) -> Job:
    """One of an agent's calls, whose program's other ones are elsewhere."""
    num_before = rng.randrange(_TURNS) * (_ROUTING_OUTPUT + _OBSERVED)
    yield [Call(common + _drawn(rng, 256 + num_before), _ROUTING_OUTPUT, 48, "agent")]


# --- leases and moves -----------------------------------------------------------------------------


def leases(args: argparse.Namespace, jobs: ProcessPoolExecutor) -> Study:
    """Four replicas whose KV does not hold all agents; as many computing whatever tools take."""
    ways = [(has_leases, moves) for has_leases in (False, True) for moves in (False, True)]
    cases = [(think_s, *way) for think_s in _THINK_S for way in ways]
    rows = list(jobs.map(partial(_leased, args.scale, args.seed), cases))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["way"], []).append((row["tools take s"], row["hit rate"]))
    title = "Cached share of prompts by the time of agents' tools"
    return Study(rows, line_chart(title, "seconds", "hit rate", lines, is_log_x=True))


def _leased(scale: float, seed: int, case: tuple[float, bool, bool]) -> dict[str, Any]:
    think_s, has_leases, moves = case
    device = replace(CPU, num_tokens=_LEASE_TOKENS)
    engine = SimulatedEngine(device, has_leases=has_leases)
    routing = Routing(lambda: policy_of("program"), moves=moves)
    fleet = FleetSimulation([engine] * 4, routing, seed=seed)
    rng = Random(seed)
    common = _drawn(rng, 384)
    num_agents = int(320 * scale)
    rate = 80 / (6 * think_s + 6)  # some 80 agents at a time
    starts, at_s = [], 0.0
    for _ in range(num_agents):
        starts.append(Start(at_s, _agent(Random(rng.random()), common, think_s, 6)))
        at_s += rng.expovariate(rate)
    fleet.run(starts)
    own_s = [job.ended_s - job.started_s - 5 * think_s for job in fleet.jobs]
    named = [name for name, is_on in (("leases", has_leases), ("moves", moves)) if is_on]
    return {
        "tools take s": think_s,
        "way": " and ".join(named) or "neither",
        "hit rate": fleet.hit_rate,
        "in the engine, mean s": statistics.mean(own_s),
        "moved": fleet.num_moved,
    }


def _agent(rng: Random, common: array[int], think_s: float, turns: int) -> Job:
    """Tools take between half and one and a half times `think_s`."""
    context = common + _drawn(rng, 256)
    for turn in range(turns):
        delay_s = rng.uniform(0.5, 1.5) * think_s if turn else 0.0
        (out,) = yield [Call(context, _ROUTING_OUTPUT, 48, "agent", delay_s=delay_s)]
        context = context + out + _drawn(rng, _OBSERVED)


# --- roles ----------------------------------------------------------------------------------------


def roles(args: argparse.Namespace, jobs: ProcessPoolExecutor) -> Study:
    """Calls come at the same rates whatever the engines do."""
    cases = [
        (mix, rate, num_prefill)
        for mix in MIXES
        for rate in _ROLE_RATES[mix.name]
        for num_prefill in _PREFILL
    ]
    rows = list(jobs.map(partial(_apart, args.seconds, args.seed), cases))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['mix']}, {row['calls/s']:g} calls/s"
        lines.setdefault(name, []).append((row["prefill"], row["TPOT p90, ms"]))
    title = "Time per token of 90% of the calls, by engines for prompts"
    return Study(rows, line_chart(title, f"of {_ENGINES} engines", "TPOT p90, ms", lines))


def _apart(seconds: float, seed: int, case: tuple[Mix, float, int]) -> dict[str, Any]:
    mix, engine_rate, num_prefill = case
    fleet = Fleet(device_of(None, "h200"), _ENGINES, links_of(GPUS["h200"])["nvlink"])
    rate = engine_rate * _ENGINES
    run = fleet.run(Layout("", num_prefill), mix, rate, seed=seed, duration_s=seconds)
    within = {
        _good_within(tpot_s): Limits(TTFT_S[mix.name], tpot_s).share(run) for tpot_s in _ROLE_TPOT_S
    }
    first = _ENGINES - num_prefill
    return {
        "mix": mix.name,
        "calls/s": rate,
        "prefill": num_prefill,
        **within,
        "TTFT p90, ms": 1e3 * percentile(sorted(each.ttft_s for each in run.times), 90),
        "TPOT p90, ms": 1e3 * percentile(sorted(each.tpot_s for each in run.times), 90),
        "busy": statistics.mean(run.busy[:first]),
        "busy, prefill": statistics.mean(run.busy[first:]) if num_prefill else None,
        "elsewhere": min(1.0, run.num_asked / run.num_all),
    }


def _good_within(tpot_s: float) -> str:
    return f"good, {1e3 * tpot_s:g} ms"


# --- guesses --------------------------------------------------------------------------------------


def guesses(args: argparse.Namespace, jobs: ProcessPoolExecutor) -> Study:
    """The engine's own budget decides how many guesses a step verifies."""
    engine = engine_of(None, "h200")
    mix = Mix("answers", "prompts of 256, answers of 64 tokens", _answers)
    limit = Cell(engine, mix, 2, args.cell_calls, seed=args.seed).largest_rate(64.0)
    cases = [(acceptance, share) for acceptance in _ACCEPTANCES for share in _SHARES]
    rows = list(jobs.map(partial(_guessed, engine, mix, limit, args), cases))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['right']:.0%} right" if row["right"] else "none"
        lines.setdefault(name, []).append((row["load"], row["TPOT p50, ms"]))
    title = "Time per token with guesses, by the load without them"
    return Study(rows, line_chart(title, "share of the largest rate", "TPOT p50, ms", lines))


def _answers(rng: Random) -> Callable[[Random], Job]:
    return _answer


def _answer(rng: Random) -> Job:
    yield [Call(_drawn(rng, 256), 64, 64, "client")]


def _guessed(
    engine: SimulatedEngine,
    mix: Mix,
    limit: float,
    args: argparse.Namespace,
    case: tuple[float, float],
) -> dict[str, Any]:
    acceptance, share = case
    cell = Cell(replace(engine, acceptance=acceptance), mix, 2, args.cell_calls, 1.0, args.seed)
    point = cell.point(share * limit)
    ones = np.ones(len(point.times))
    return {
        "right": acceptance,
        "load": share,
        "calls/s": point.rate,
        "TPOT p50, ms": 1e3 * quantile(point.times[:, 1], ones, 0.5),
        "TTFT p50, ms": 1e3 * quantile(point.times[:, 0], ones, 0.5),
        "busy": point.busy,
    }


# --- a region -------------------------------------------------------------------------------------


def region(args: argparse.Namespace, jobs: ProcessPoolExecutor) -> Study:
    """A day of a million agents, of which some are at work; replicas follow them, or do not."""
    engine = engine_of(None, "h200")
    mix = Mix("agents", f"{_TURNS} turns, pauses of {_PAUSE_S:g} s", _region_agents, _TURNS)
    cell = Cell(engine, mix, 2, args.cell_calls, 1.2 * _TURNS * _PAUSE_S, args.seed)
    surface = Surface.learn(cell, cell.largest_rate(4.0), jobs)
    call_s = _PAUSE_S + 2.0  # of an agent, from one call to the next
    slots = range(round(24 * 3600 / _SLOT_S))
    low, high = _ACTIVE
    shares = [low + (high - low) * (1 - cos(2 * pi * n / len(slots))) / 2 for n in slots]
    rates = [_AGENTS * share / call_s for share in shares]
    most = round(max(rates) / (0.8 * surface.limit))
    rows = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, scaling in (
        ("as many all day", None),
        ("as many as are wanted", _scaling(surface, most)),
    ):
        found = CellFleet(
            [_region_pool(engine, surface, most, scaling)],
            _OUTPUT,
            Failures(mean_s=30 * 24 * 3600.0, repair_s=600.0, slow_share=0.005),
            args.seed,
        ).run(rates, _SLOT_S, ttft_s=1.0, tpot_s=0.05)
        rows.append(
            {
                "replicas": name,
                "H200": most,
                "on average": found.pools[0].paid_s / 24 / 3600,
                "calls, million": found.num_calls / 1e6,
                "good": found.good_share,
                "TTFT p50, s": found.ttft_s[0.5],
                "TTFT p99, s": found.ttft_s[0.99],
                "hit rate": found.hit_rate,
                "$ a day": found.cost,
                "$ a million tokens": found.cost_per_million,
            }
        )
    hours = [n * _SLOT_S / 3600 for n in slots]
    every = max(1, len(hours) // 48)
    lines["calls/s"] = list(zip(hours, rates, strict=True))[::every]
    return Study(rows, line_chart("A day of a million agents", "hour", "calls/s", lines))


def _region_agents(rng: Random) -> Callable[[Random], Job]:
    kinds = [_drawn(rng, 2048) for _ in range(16)]
    return partial(_region_agent, kinds)


def _region_agent(kinds: Sequence[array[int]], rng: Random) -> Job:
    """Instructions and tools of 2,048 tokens, of 16 kinds; 512 tokens observed a turn."""
    context = rng.choice(kinds) + _drawn(rng, 512)
    for turn in range(_TURNS):
        delay_s = rng.expovariate(1 / _PAUSE_S) if turn else 0.0
        (out,) = yield [Call(context, _OUTPUT, 256, "agent", delay_s=delay_s)]
        context = context + out + _drawn(rng, 512)


def _scaling(surface: Surface, most: int) -> Autoscaling:
    """A replica is to have 0.8 of the calls in flight that it has near its limit."""
    last = surface.points[-1]
    target = max(1.0, 0.8 * last.rate * last.call_s)
    return Autoscaling(most // 10, most, target, up_s=30.0, down_s=600.0, start_s=120.0)


def _region_pool(
    engine: SimulatedEngine, surface: Surface, number: int, scaling: Autoscaling | None
) -> Pool:
    device = engine.device
    return Pool(
        "h200", surface, number, device.prefill_token_ms / 1e3, device.num_tokens,
        GPU_HOUR["h200"] / 3600, scaling,
    )  # fmt: skip


def _drawn(rng: Random, num_tokens: int) -> array[int]:
    return array("i", rng.randbytes(4 * num_tokens))


STUDIES: dict[str, Callable[[argparse.Namespace, ProcessPoolExecutor], Study]] = {
    study.__name__: study for study in (routing, leases, roles, guesses, region)
}
