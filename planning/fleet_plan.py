"""Which of the GPUs at hand serve a trace within limits for the least money, and how they are used.

For each kind of GPU: the smallest groups that hold the model (tensor parallelism), then prefill and
decode apart at every ratio (DistServe's search), smaller chunks, a tier of KV in the host's memory
and guessed tokens, each by the rate of calls within the limits (roles.py). What is kept is
simulated at several rates (surface.py). Kinds are then bought in the order of what a good call
costs, the fewest replicas with which the whole trace is within the limits (cells.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from ..cluster.placement.policies import policy_of
from ..errors import InvalidRequest, StemmaError
from ..kernels.kv_cache_dtype import KVCacheDtype
from ..runtime.checkpoint.config.model_config import ModelConfig
from .calibration import NO_CALIBRATION, Calibration
from .cells import SLOT_S, CellFleet, FleetFigures, Pool
from .devices import GPUS, links_of
from .fleet_simulation import FleetSimulation, Routing
from .rank_shape import num_sums, parts_of
from .roles import Fleet, Layout, Limits, RoughTimes, Search, layouts
from .roofline import CostModel
from .roofline_device import RooflineDevice
from .served_model import ServedModel
from .simulated_engine import SimulatedEngine
from .surface import Cell, Surface, quantile
from .trace_files import Trace

_RANKS = (1, 2, 4, 8)
_APART = 4  # engines of the layouts with roles
_TOGETHER = 2
_NUM_CALLS = 160  # of a run of the search, about
_WORTH = 1.03  # times the calls, or a feature is left out
_EXACT_CALLS = 1500  # of the exact check, at most
_EXACT_REPLICAS = 64


@dataclass(frozen=True)
class Wish:
    """What is to be planned. `gpus`: how many there are of each; `prices`: dollars an hour of each;
    `host_bytes`: for KV in the host's memory, a GPU; `acceptance`: see SimulatedEngine."""

    config: ModelConfig
    gpus: Mapping[str, int]
    trace: Trace
    limits: Limits
    good_share: float
    prices: Mapping[str, float]
    dtype: str = "bfloat16"
    quantization: str = "none"
    kv_cache_dtype: KVCacheDtype = "auto"
    host_bytes: int = 0
    acceptance: float = 0.0
    max_running_requests: int = 128
    calibrations: Mapping[str, Path] | None = None  # by GPU: reports of `stemma bench step`

    def device(self, gpu: str, num_ranks: int) -> RooflineDevice:
        """So many GPUs as one engine. Raises InvalidRequest where the model does not fit."""
        ((rank, stage),) = parts_of(self.config, num_ranks, 1)
        model = ServedModel.of(
            rank, self.dtype, self.quantization, self.kv_cache_dtype, stage=stage
        )
        costs = CostModel(model, GPUS[gpu], num_ranks, num_sums(self.config, num_ranks))
        fit = model.fit(
            GPUS[gpu].memory_bytes, is_gpu=True, max_running_requests=self.max_running_requests
        )
        if fit.kv_tokens < self.trace.longest:
            allowed = (
                f"GPUs with room for KV of {self.trace.longest:,} tokens, the trace's longest call"
            )
            raise InvalidRequest.of("fleet", f"{num_ranks} {gpu}", allowed)
        path = (self.calibrations or {}).get(gpu)
        calibration = NO_CALIBRATION if path is None else Calibration.read(path, costs)
        enough = 4 * self.max_running_requests * self.trace.longest  # more would change nothing
        tokens = min(fit.kv_tokens, enough)
        return RooflineDevice(costs, tokens, self.max_running_requests, calibration)


@dataclass(frozen=True)
class Option:
    """One way to use the GPUs of a kind, and calls a second of one GPU within the limits."""

    gpu: str
    tp_size: int
    layout: Layout
    num_engines: int  # of the cell that was searched
    host_tokens: int = 0
    acceptance: float = 0.0
    calls_s: float = 0.0

    @property
    def name(self) -> str:
        parts = [self.layout.name]
        parts += ["KV in the host's memory"] if self.host_tokens else []
        parts += ["guessed tokens"] if self.acceptance else []
        return ", ".join(parts)

    @property
    def is_deployable(self) -> bool:
        """On Ray engines have no roles yet."""
        return not self.layout.num_prefill

    def engine(self, wish: Wish) -> SimulatedEngine:
        """Each of them."""
        device = wish.device(self.gpu, self.tp_size)
        return SimulatedEngine(
            device, self.layout.chunking, self.host_tokens, self.acceptance, pool=self.gpu
        )

    def measured(self, wish: Wish) -> Option:
        """With the calls that it serves."""
        device = wish.device(self.gpu, self.tp_size)
        link = next(iter(links_of(GPUS[self.gpu]).values()))
        fleet = Fleet(device, self.num_engines, link, self.host_tokens, self.acceptance)
        first = first_rate(wish, device)
        search = Search(
            fleet,
            self.layout,
            wish.trace.mix(),
            first_rate=0.5 * self.num_engines * first.rate,
            duration_s=2 * first.program_s + wish.limits.ttft_s,
            num_calls=_NUM_CALLS,
        )
        rate = search.goodput(wish.limits, wish.good_share).rate
        return replace(self, calls_s=rate / self.num_engines / self.tp_size)


@dataclass(frozen=True)
class FirstRate:
    """Where a search begins."""

    rate: float  # calls a second of an engine
    program_s: float  # with nobody beside it, pauses included, on average


def first_rate(wish: Wish, device: RooflineDevice) -> FirstRate:
    """As if nothing were cached."""
    programs = wish.trace.programs
    calls = [call for each in programs[:512] for step in each.steps for call in step]
    prompt = sum(text.num_tokens for call in calls for text in call.texts) // len(calls)
    rough = RoughTimes.of(device, max(1, prompt), max(1, round(wish.trace.num_output)))
    pauses_s = sum(max(call.pause_s for call in step) for each in programs for step in each.steps)
    alone_s = wish.trace.num_calls * rough.alone_s
    return FirstRate(1 / rough.share_s, alone_s + pauses_s / len(programs))


@dataclass(frozen=True)
class PlannedPool:
    """A kind of GPU as it is to be used: so many replicas of it, of those that there are."""

    option: Option
    options: tuple[Option, ...]  # all that were compared
    pool: Pool  # with all replicas that there are
    num_replicas: int
    good_calls_s: float  # of a replica, within the limits


@dataclass(frozen=True)
class FleetPlan:
    """The answer."""

    pools: tuple[PlannedPool, ...]
    figures: FleetFigures  # of the whole trace
    is_enough: bool  # the limits are met
    why_not: Mapping[str, str]  # kinds of GPU that cannot serve it
    checked: ExactFigures | None = None  # of its busiest part, where that is small enough


@dataclass(frozen=True)
class ExactFigures:
    """Of the busiest part of a trace, simulated exactly."""

    seconds: float
    num_calls: int
    good_share: float
    ttft_s: float  # median
    tpot_s: float


def plan_fleet(
    wish: Wish, times: float = 1.0, jobs: Executor | None = None, say: Callable[[str], None] = print
) -> FleetPlan:
    """`times`: of the trace's programs. `say`: what is done meanwhile. Raises InvalidRequest where
    no kind of GPU can serve the model."""
    run = map if jobs is None else jobs.map
    options, why_not = _first_options(wish)
    say(f"{len(options)} groups of GPUs that hold the model")
    grouped = list(run(partial(_measured, wish), options))
    best = {gpu: _best([each for each in grouped if each.gpu == gpu]) for gpu in wish.gpus}
    more = [each for gpu, one in best.items() if one is not None for each in _variants(wish, one)]
    say(f"{len(more)} ways to use them")
    grouped += list(run(partial(_measured, wish), more))
    pools = []
    for gpu, one in best.items():
        own = [each for each in grouped if each.gpu == gpu]
        if one is not None:
            say(f"{gpu}: the chosen way at several rates")
            pools.append(_pool(wish, _combined(own, one), own, jobs))
        elif gpu not in why_not:
            why_not[gpu] = "no rate of calls is within the limits"
    if not pools:
        reasons = "; ".join(f"{gpu}: {why}" for gpu, why in why_not.items())
        raise InvalidRequest.of("fleet", dict(wish.gpus), f"GPUs that can serve it ({reasons})")
    pools.sort(key=lambda each: each.pool.price_s / max(1e-9, each.good_calls_s))
    say("how many replicas")
    plan = _sized(wish, pools, times, why_not)
    return replace(plan, checked=_checked(wish, plan.pools, times))


def _first_options(wish: Wish) -> tuple[list[Option], dict[str, str]]:
    """Every size of group that holds the model."""
    options, why_not = [], {}
    for gpu, number in wish.gpus.items():
        for num_ranks in (each for each in _RANKS if each <= number):
            try:
                wish.device(gpu, num_ranks)
            except StemmaError as error:
                why_not[gpu] = str(error)
                continue
            num = min(_TOGETHER, number // num_ranks)
            options.append(Option(gpu, num_ranks, Layout("together"), num))
    fitting = {each.gpu for each in options}
    return options, {gpu: why for gpu, why in why_not.items() if gpu not in fitting}


def _measured(wish: Wish, option: Option) -> Option:
    return option.measured(wish)


def _best(options: Sequence[Option]) -> Option | None:
    good = [each for each in options if each.calls_s > 0]
    return max(good, key=lambda each: each.calls_s, default=None)


def _variants(wish: Wish, one: Option) -> list[Option]:
    """What else may be done with groups of the best size."""
    device = wish.device(one.gpu, one.tp_size)
    found = [replace(one, layout=layouts(2)[1])]
    if wish.host_bytes:
        host_tokens = wish.host_bytes // device.costs.model.kv_bytes_per_token
        found += [replace(one, host_tokens=host_tokens)] if host_tokens else []
    if wish.acceptance:
        found.append(replace(one, acceptance=wish.acceptance))
    has_room = wish.gpus[one.gpu] // one.tp_size >= _APART and not device.costs.model.state_bytes
    if has_room:
        apart = [each for each in layouts(_APART) if each.num_prefill]
        found += [replace(one, layout=each, num_engines=_APART) for each in apart]
    return found


def _combined(options: Sequence[Option], one: Option) -> Option:
    """Every feature that pays by itself."""
    own = [each for each in options if each.tp_size == one.tp_size and each.is_deployable]
    paying = [each for each in own if each.calls_s > _WORTH * one.calls_s]
    result = one
    for each in paying:
        if each.layout != one.layout:
            result = replace(result, layout=each.layout)
        result = replace(
            result,
            host_tokens=each.host_tokens or result.host_tokens,
            acceptance=each.acceptance or result.acceptance,
        )
    return result


def _pool(
    wish: Wish, option: Option, options: Sequence[Option], jobs: Executor | None
) -> PlannedPool:
    engine = option.engine(wish)
    num_replicas = wish.gpus[option.gpu] // option.tp_size
    first = first_rate(wish, wish.device(option.gpu, option.tp_size))
    cell = Cell(engine, wish.trace.mix(), min(4, num_replicas), 240, 2 * first.program_s)
    surface = Surface.learn(cell, cell.largest_rate(first.rate), jobs)
    price_s = wish.prices[option.gpu] * option.tp_size / 3600
    device = engine.device
    pool = Pool(
        option.gpu, surface, num_replicas, device.prefill_token_ms / 1e3, device.num_tokens, price_s
    )
    good = good_rate(surface, wish.limits, wish.good_share)
    return PlannedPool(option, tuple(options), pool, num_replicas, good)


def good_rate(surface: Surface, limits: Limits, good_share: float) -> float:
    """The largest of the surface's rates at which enough calls are good; 0: none."""
    rate = 0.0
    for point in surface.points:
        times = point.times
        good = (times[:, 0] <= limits.ttft_s) & (times[:, 1] <= limits.tpot_s)
        if len(times) and good.mean() >= good_share:
            rate = point.rate
    return rate


def _sized(
    wish: Wish, pools: Sequence[PlannedPool], times: float, why_not: Mapping[str, str]
) -> FleetPlan:
    """The fewest replicas, the cheapest calls first."""
    rates = [times * rate for rate in wish.trace.call_rates(SLOT_S)]
    total = sum(each.num_replicas for each in pools)

    def with_replicas(number: int) -> list[PlannedPool]:
        chosen, left = [], number
        for each in pools:
            num = min(left, each.num_replicas)
            left -= num
            if num:
                chosen.append(replace(each, num_replicas=num))
        return chosen

    def figures(chosen: Sequence[PlannedPool]) -> FleetFigures:
        own = [replace(each.pool, num_replicas=each.num_replicas) for each in chosen]
        fleet = CellFleet(own, wish.trace.num_output)
        return fleet.run(rates, ttft_s=wish.limits.ttft_s, tpot_s=wish.limits.tpot_s)

    low, high = 0, total
    while high - low > 1:
        middle = (low + high) // 2
        is_good = figures(with_replicas(middle)).good_share >= wish.good_share
        low, high = (low, middle) if is_good else (middle, high)
    chosen = with_replicas(high)
    found = figures(chosen)
    return FleetPlan(tuple(chosen), found, found.good_share >= wish.good_share, why_not)


def _checked(wish: Wish, chosen: Sequence[PlannedPool], times: float) -> ExactFigures | None:
    """The chosen fleet, unlike engines behind the router's own policy, over the busiest slots."""
    if sum(each.num_replicas for each in chosen) > _EXACT_REPLICAS:
        return None
    rates = wish.trace.call_rates(SLOT_S)
    busiest = max(range(len(rates)), key=rates.__getitem__)
    window = wish.trace.window(SLOT_S * max(0, busiest - 1), SLOT_S * (busiest + 1))
    num_calls = times * sum(each.num_calls for each in window.programs)
    if not 1 <= num_calls <= _EXACT_CALLS:
        return None
    engines = [each.option.engine(wish) for each in chosen for _ in range(each.num_replicas)]
    fleet = FleetSimulation(engines, Routing(lambda: policy_of("program")))
    fleet.run(window.starts(times=times))
    found = np.array([(each.ttft_s, each.tpot_s) for each in fleet.times])
    limits, ones = wish.limits, np.ones(len(found))
    good = (found[:, 0] <= limits.ttft_s) & (found[:, 1] <= limits.tpot_s)
    return ExactFigures(
        window.duration_s,
        len(found),
        float(good.mean()),
        quantile(found[:, 0], ones, 0.5),
        quantile(found[:, 1], ones, 0.5),
    )
