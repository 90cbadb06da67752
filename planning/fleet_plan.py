"""Which of the GPUs at hand serve a trace within limits for the least money, and how they are used.

For each kind of GPU: groups that hold the model (tensor parallelism), then prefill and decode apart
at every ratio (DistServe's search), smaller chunks, a tier of KV in the host's memory and guessed
tokens, each by the rate of calls within the limits (roles.py). Groups on which too few calls would
be good even alone, by the roofline, are not simulated; of the others each is searched only if it is
good at the rate that would make it better than the best one before. What is kept is simulated at
several rates (surface.py). Kinds are then bought in the order of what a good call costs, the fewest
replicas with which the whole trace is within the limits (cells.py), and exchanged while others do
for less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np

from ..errors import InvalidRequest, StemmaError
from ..kernels.kv_cache_dtype import KVCacheDtype
from ..runtime.checkpoint.config.model_config import ModelConfig
from .calibration import NO_CALIBRATION, Calibration
from .cells import SLOT_S, CellFleet, FleetFigures, Pool
from .devices import GPUS, links_of
from .fleet_simulation import FleetSimulation
from .rank_shape import num_sums, parts_of
from .roles import Fleet, Layout, Limits, RoughTimes, Search, layouts
from .roofline import CostModel
from .roofline_device import RooflineDevice
from .served_model import ServedModel
from .simulated_engine import SimulatedEngine
from .surface import ROUTING, Cell, Floats, Surface, quantile
from .trace_files import Trace
from .traces import Start

_RANKS = (1, 2, 4, 8)
_APART = 4  # engines of the layouts with roles
_TOGETHER = 2
_NUM_CALLS = 160  # of a run of the search, about
_WORTH = 1.03  # times the calls, or a feature is left out
_SURFACE_CALLS = 4000  # of the cell's fullest point, about
_LEAST_CELL, _MOST_CELL = 4, 32  # engines
_BEYOND = 1.2  # times the good rate: mostly more than is served, by little, as overload costs most
_PROGRAMS = 6  # times a program's time alone, that counts of a run: under load it takes thrice that
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
    """One way to use the GPUs of a kind, and calls a second of one GPU within the limits: 0 where
    they are fewer than `less_than`, which is all that was asked."""

    gpu: str
    tp_size: int
    layout: Layout
    num_engines: int  # of the cell that was searched
    host_tokens: int = 0
    acceptance: float = 0.0
    calls_s: float = 0.0
    less_than: float = 0.0

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

    def measured(self, wish: Wish, least: float = 0.0) -> Option:
        """With the calls that it serves, if they are `least` a second of a GPU."""
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
        num_gpus = self.num_engines * self.tp_size
        rate = search.goodput(wish.limits, wish.good_share, least * num_gpus).rate
        return replace(self, calls_s=rate / num_gpus, less_than=0.0 if rate else least)


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
    pool: Pool  # with all replicas that there are
    num_replicas: int
    good_calls_s: float  # of a replica, within the limits
    share: float = 1.0  # of the programs


@dataclass(frozen=True)
class FleetPlan:
    """The answer."""

    pools: tuple[PlannedPool, ...]
    figures: FleetFigures  # of the whole trace
    is_enough: bool  # the limits are met
    learned: tuple[PlannedPool, ...]  # every kind that can serve it, the cheapest calls first
    why_not: Mapping[str, str] = field(default_factory=dict)  # kinds of GPU that cannot
    options: tuple[Option, ...] = ()  # all that were compared
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
    options, why_not = _first_options(wish)
    say(f"{len(options)} groups of GPUs that may serve it")
    found, best = _compared(wish, options, jobs)
    more = [each for one in best.values() for each in _variants(wish, one)]
    say(f"{len(more)} more ways to use them")
    rates = [_WORTH * best[each.gpu].calls_s for each in more]
    found += _searched(wish, more, rates, jobs)
    pools: list[PlannedPool] = []
    for gpu in wish.gpus:
        own = [each for each in found if each.gpu == gpu]
        if gpu in best:
            chosen = _combined(own, best[gpu])
            say(f"{gpu}: {chosen.name} on groups of {chosen.tp_size}, at several rates")
            pool = _pool(wish, chosen, jobs)
            pools += [pool] if pool.good_calls_s else []
        if gpu not in why_not and all(each.option.gpu != gpu for each in pools):
            why_not[gpu] = "no rate of calls is within the limits"
    if not pools:
        reasons = "; ".join(f"{gpu}: {why}" for gpu, why in why_not.items())
        raise InvalidRequest.of("fleet", dict(wish.gpus), f"GPUs that can serve it ({reasons})")
    pools.sort(key=lambda each: each.pool.price_s / each.good_calls_s)
    say("how many replicas")
    plan = _sized(wish, pools, times)
    checked = _checked(wish, plan.pools, times)
    return replace(plan, why_not=why_not, options=tuple(found), checked=checked)


def _first_options(wish: Wish) -> tuple[list[Option], dict[str, str]]:
    """Every size of group that holds the model, and on which enough calls would be good alone; of
    each kind those first that would serve the most calls a GPU if nothing were cached."""
    options, why_not = [], {}
    for gpu, number in wish.gpus.items():
        own = []
        for num_ranks in (each for each in _RANKS if each <= number):
            try:
                device = wish.device(gpu, num_ranks)
            except StemmaError as error:
                why_not[gpu] = str(error)
                continue
            if (share := good_alone(wish, device)) < wish.good_share:
                why_not[gpu] = f"alone on {num_ranks} of them {share:.0%} of the calls are good"
                continue
            num = min(_TOGETHER, number // num_ranks)
            rate = first_rate(wish, device).rate / num_ranks
            own.append((rate, Option(gpu, num_ranks, Layout("together"), num)))
        options += [option for _, option in sorted(own, key=lambda each: -each[0])]
    fitting = {each.gpu for each in options}
    return options, {gpu: why for gpu, why in why_not.items() if gpu not in fitting}


def good_alone(wish: Wish, device: RooflineDevice) -> float:
    """The share of the trace's calls that would be good with an engine for each and all of its
    prompt cached but for what no other call has: no load has a larger one, without guesses."""
    calls = [call for each in wish.trace.programs for step in each.steps for call in step]
    own = [sum(text.num_tokens for text in call.texts if not text.name) for call in calls]
    ttft_s = {num: device.rows_s([(max(1, num), 0)], 1) for num in set(own)}
    is_fast = device.rows_s([(1, 1)], 1) <= wish.limits.tpot_s
    good = [
        ttft_s[num] <= wish.limits.ttft_s and (is_fast or call.num_output == 1)
        for call, num in zip(calls, own, strict=True)
    ]
    return sum(good) / len(good)


def _compared(
    wish: Wish, options: Sequence[Option], jobs: Executor | None
) -> tuple[list[Option], dict[str, Option]]:
    """All of them with what they serve, and the best of each kind: the first one of a kind is
    searched, the others as far as they are better."""
    firsts = [next(each for each in options if each.gpu == gpu) for gpu in _kinds(options)]
    found = _searched(wish, firsts, [0.0] * len(firsts), jobs)
    rates = {each.gpu: each.calls_s for each in found}
    others = [each for each in options if each not in firsts]
    found += _searched(wish, others, [rates[each.gpu] for each in others], jobs)
    best: dict[str, Option] = {}
    for each in found:
        if each.calls_s > (best[each.gpu].calls_s if each.gpu in best else 0.0):
            best[each.gpu] = each
    return found, best


def _kinds(options: Sequence[Option]) -> list[str]:
    return list(dict.fromkeys(each.gpu for each in options))


def _searched(
    wish: Wish, options: Sequence[Option], rates: Sequence[float], jobs: Executor | None
) -> list[Option]:
    """Each from its own rate on."""
    run = map if jobs is None else jobs.map
    return list(run(partial(_measured, wish), options, rates))


def _measured(wish: Wish, option: Option, least: float) -> Option:
    return option.measured(wish, least)


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


def _pool(wish: Wish, option: Option, jobs: Executor | None) -> PlannedPool:
    """Learned from as many engines as make enough calls while programs come and go."""
    engine = option.engine(wish)
    num_replicas = wish.gpus[option.gpu] // option.tp_size
    device = wish.device(option.gpu, option.tp_size)
    rate = option.calls_s * option.tp_size
    least_s = _PROGRAMS * first_rate(wish, device).program_s
    num_engines = min(_MOST_CELL, max(_LEAST_CELL, round(_SURFACE_CALLS / (rate * least_s))))
    num_engines = min(num_engines, num_replicas)
    cell = Cell(engine, wish.trace.mix(), num_engines, _NUM_CALLS, least_s)
    surface = Surface.learn(cell, _BEYOND * rate, jobs)
    price_s = wish.prices[option.gpu] * option.tp_size / 3600
    pool = Pool(
        option.gpu, surface, num_replicas, device.prefill_token_ms / 1e3, device.num_tokens, price_s
    )
    good = good_rate(surface, wish.limits, wish.good_share)
    return PlannedPool(option, pool, num_replicas, good)


def good_rate(surface: Surface, limits: Limits, good_share: float) -> float:
    """The largest of the surface's rates at which enough calls are good; 0: none."""
    rate = 0.0
    for point in surface.points:
        times = point.times
        good = (times[:, 0] <= limits.ttft_s) & (times[:, 1] <= limits.tpot_s)
        if len(times) and good.mean() >= good_share:
            rate = point.rate
    return rate


def _sized(wish: Wish, pools: Sequence[PlannedPool], times: float) -> FleetPlan:
    """The fewest replicas, the cheapest calls first, then exchanged for what costs less."""
    rates = [times * rate for rate in wish.trace.call_rates(SLOT_S)]

    def chosen(numbers: Sequence[int]) -> list[PlannedPool]:
        own = [(each, num) for each, num in zip(pools, numbers, strict=True) if num]
        total = sum(num * each.good_calls_s for each, num in own)
        return [
            replace(each, num_replicas=num, share=num * each.good_calls_s / total)
            for each, num in own
        ]

    def figures(own: Sequence[PlannedPool]) -> FleetFigures:
        fleet = CellFleet(
            [replace(each.pool, num_replicas=each.num_replicas) for each in own],
            wish.trace.num_output,
            shares=[each.share for each in own],
        )
        return fleet.run(rates, ttft_s=wish.limits.ttft_s, tpot_s=wish.limits.tpot_s)

    def is_good(numbers: Sequence[int]) -> bool:
        return any(numbers) and figures(chosen(numbers)).good_share >= wish.good_share

    most = [each.num_replicas for each in pools]
    enough = _fewest(most, is_good)
    if enough is not None:
        enough = _exchanged(enough, most, [each.pool.price_s for each in pools], is_good)
    own = chosen(enough or most)
    return FleetPlan(tuple(own), figures(own), enough is not None, tuple(pools))


def _fewest(
    most: Sequence[int], is_good: Callable[[Sequence[int]], bool]
) -> tuple[int, ...] | None:
    """Of each pool, the first ones first; None: all together are not enough."""

    def first(number: int) -> tuple[int, ...]:
        before = [sum(most[:index]) for index in range(len(most))]
        return tuple(min(num, max(0, number - start)) for num, start in zip(most, before))

    found = _least(1, sum(most), lambda number: is_good(first(number)))
    return None if found is None else first(found)


def _exchanged(
    numbers: tuple[int, ...],
    most: Sequence[int],
    prices: Sequence[float],
    is_good: Callable[[Sequence[int]], bool],
) -> tuple[int, ...]:
    """For less money: while 1, 2, 4 ... or all replicas of a pool can be left out, with some more
    of another one or without, that cost less, they are. Prices: of a replica."""
    better: tuple[int, ...] | None = numbers
    while better is not None:
        numbers, better = better, _exchanged_once(better, most, prices, is_good)
    return numbers


def _exchanged_once(
    numbers: tuple[int, ...],
    most: Sequence[int],
    prices: Sequence[float],
    is_good: Callable[[Sequence[int]], bool],
) -> tuple[int, ...] | None:
    """By the most that can be; None: by nothing."""
    for here, there in permutations(range(len(most)), 2):
        num_here = numbers[here]
        powers = [2**power for power in range(num_here.bit_length()) if 2**power < num_here]
        for num_fewer in [num_here, *reversed(powers)] if num_here else ():
            moved = partial(_moved, numbers, here, num_fewer, there)
            saved = num_fewer * prices[here]
            room = range(most[there] - numbers[there] + 1)
            cheaper = [num for num in room if num * prices[there] < saved]
            is_enough = partial(_is_good_then, is_good, moved)
            found = _least(0, max(cheaper, default=-1), is_enough)
            if found is not None:
                return moved(found)
    return None


def _is_good_then(
    is_good: Callable[[Sequence[int]], bool],
    moved: Callable[[int], tuple[int, ...]],
    num_more: int,
) -> bool:
    return is_good(moved(num_more))


def _moved(
    numbers: Sequence[int], here: int, num_fewer: int, there: int, num_more: int
) -> tuple[int, ...]:
    found = list(numbers)
    found[here] -= num_fewer
    found[there] += num_more
    return tuple(found)


def _least(low: int, high: int, is_enough: Callable[[int], bool]) -> int | None:
    """The smallest number of them that is, where each larger one is, too; None: none."""
    if low > high or not is_enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return low


def _checked(wish: Wish, chosen: Sequence[PlannedPool], times: float) -> ExactFigures | None:
    """The chosen fleet, each pool behind the router's own policy, over the busiest slots."""
    if sum(each.num_replicas for each in chosen) > _EXACT_REPLICAS:
        return None
    rates = wish.trace.call_rates(SLOT_S)
    busiest = max(range(len(rates)), key=rates.__getitem__)
    window = wish.trace.window(SLOT_S * max(0, busiest - 1), SLOT_S * (busiest + 1))
    num_calls = times * sum(each.num_calls for each in window.programs)
    if not 1 <= num_calls <= _EXACT_CALLS:
        return None
    found = np.concatenate(
        [
            _exact_times(each, wish, window.starts(seed, times * each.share))
            for seed, each in enumerate(chosen)
        ]
    )
    if not len(found):
        return None
    limits, ones = wish.limits, np.ones(len(found))
    good = (found[:, 0] <= limits.ttft_s) & (found[:, 1] <= limits.tpot_s)
    return ExactFigures(
        window.duration_s,
        len(found),
        float(good.mean()),
        quantile(found[:, 0], ones, 0.5),
        quantile(found[:, 1], ones, 0.5),
    )


def _exact_times(pool: PlannedPool, wish: Wish, starts: Sequence[Start]) -> Floats:
    """TTFT and TPOT [num_calls, 2] of a pool's calls."""
    fleet = FleetSimulation([pool.option.engine(wish)] * pool.num_replicas, ROUTING)
    fleet.run(starts)
    return np.array([(each.ttft_s, each.tpot_s) for each in fleet.times]).reshape(-1, 2)
