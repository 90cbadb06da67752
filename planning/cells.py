"""A fleet of any size over a trace: cells of engines by response surfaces, and the router over all,
or routers of their own over pools of them.

A mean-field model: each cell, some engines of one pool, has a rate of calls, a queue of those that
it could not serve yet, and engines that fail or are slow; what its calls take at that rate was
learned from a cell simulated exactly (surface.py). In each slot of time the router's own rule gives
a program to where the least time is expected, until that time is the same everywhere: the rates are
the ones at which all cells expect equally long (Wardrop's first principle, found by bisection).
Cost: a slot takes some numpy operations over all cells, whatever the number of calls.

Left out: KV that is lost with an engine, programs that outlast a slot, and fluctuations between
cells beyond those within the cell that was simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..cluster.scaling import FleetLoad, Scaler
from .fleet_events import Autoscaling
from .surface import Floats, Surface, quantile

SLOT_S = 10.0
_CELL = 8  # replicas
_BISECTIONS = 40
_MAX_DELAYS = 48  # bins of waiting behind a queue, by the logarithm
_LEAST_DELAY_S, _MOST_DELAY_S = 0.05, 1e5


@dataclass(frozen=True, slots=True)
class Failures:
    """Of each replica, independently: away for `repair_s` once in `mean_s` on average; the share of
    the replicas that is slow, and by which factor."""

    mean_s: float = float("inf")
    repair_s: float = 300.0
    slow_share: float = 0.0
    slow_factor: float = 2.0


NO_FAILURES = Failures()


@dataclass(frozen=True)
class Pool:
    """Replicas that are alike. `prompt_token_s`: of their device; `price_s`: dollars a second for
    one replica, all its GPUs."""

    name: str
    surface: Surface
    num_replicas: int
    prompt_token_s: float
    kv_tokens: int
    price_s: float = 0.0
    scaling: Autoscaling | None = None


@dataclass(frozen=True)
class PoolFigures:
    """Of one pool over a run."""

    name: str
    num_replicas: int
    share: float  # of the calls
    busy: float  # mean share of the time
    paid_s: float  # of replicas
    cost: float  # dollars


@dataclass(frozen=True)
class FleetFigures:
    """Of all calls; `ttft_s` and so on: pairs of a quantile and its seconds."""

    num_calls: float
    num_served: float
    output_tokens_s: float
    ttft_s: dict[float, float]
    tpot_s: dict[float, float]
    good_share: float
    hit_rate: float
    cost: float
    cost_per_million: float  # dollars, of output tokens
    pools: tuple[PoolFigures, ...]


class _PoolState:
    """Owns the arrays of a pool's cells: [num_cells] each."""

    def __init__(self, pool: Pool, failures: Failures, rng: np.random.Generator) -> None:
        self.pool = pool
        surface = pool.surface
        num_cells = max(1, round(pool.num_replicas / _CELL))
        sizes = np.full(num_cells, pool.num_replicas // num_cells)
        sizes[: pool.num_replicas % num_cells] += 1
        self.sizes = sizes
        self.num_away = np.zeros(num_cells, dtype=np.int64)
        num_slow = rng.binomial(sizes, failures.slow_share)
        self.speed = 1 - num_slow / sizes * (1 - 1 / failures.slow_factor)
        self.queue: Floats = np.zeros(num_cells)
        self.engines: Floats = np.zeros(num_cells)  # there, a slow one as a part of one
        self.present = float(pool.num_replicas)
        self.weights = np.zeros((len(surface.points), _MAX_DELAYS + 1))
        self.num_calls = self.num_served = self.busy_s = self.paid_s = self.hit = 0.0
        self.now_s = 0.0
        self._failures = failures
        self._rng = rng
        self._coming: list[tuple[float, int]] = []
        self._scaler: Scaler | None = None
        if pool.scaling is not None:
            self.present = float(pool.scaling.least)
            self._scaler = pool.scaling.scaler(lambda: self.now_s)

    def begin_slot(self, now_s: float, slot_s: float) -> None:
        """Replicas fail and are there again; those that were asked for come."""
        self.now_s = now_s
        failures, rng = self._failures, self._rng
        if failures.mean_s < float("inf"):
            there = self.sizes - self.num_away
            self.num_away += rng.binomial(there, 1 - np.exp(-slot_s / failures.mean_s))
            self.num_away -= rng.binomial(self.num_away, 1 - np.exp(-slot_s / failures.repair_s))
        self.present += sum(num for at_s, num in self._coming if at_s <= now_s)
        self._coming = [each for each in self._coming if each[0] > now_s]
        share = self.present / self.pool.num_replicas
        self.engines = np.maximum(0.0, self.sizes - self.num_away) * (share * self.speed)
        self.paid_s += (self.present + sum(num for _, num in self._coming)) * slot_s

    @property
    def limits(self) -> Floats:
        """Calls a second that each cell serves."""
        found: Floats = self.engines * self.pool.surface.limit
        return found

    def rates_at(self, level_s: float) -> Floats:
        """Calls a second of each cell, so that the next one's first token is expected in so many
        seconds. What waits in its queue is before it."""
        rates, tokens = self.pool.surface.waiting
        limits = self.limits
        queue_s = np.divide(self.queue, limits, out=np.zeros_like(limits), where=limits > 0)
        left = (level_s - queue_s) / self.pool.prompt_token_s
        found: Floats = self.engines * np.interp(left, tokens, rates)
        return found

    def take(self, rates: Floats, slot_s: float) -> None:
        """A slot's calls at these rates."""
        limits, surface = self.limits, self.pool.surface
        wanted = self.queue + rates * slot_s
        served = np.minimum(wanted, limits * slot_s)
        after = wanted - served
        with np.errstate(divide="ignore", invalid="ignore"):
            delay_s = np.where(limits > 0, (self.queue + after) / 2 / limits, _MOST_DELAY_S)
            each = np.where(self.engines > 0, served / slot_s / self.engines, 0.0)
        delay_s = np.where(wanted > 0, delay_s, 0.0)
        points, shares = surface.shares(each)
        bins = _bin_of(delay_s)
        num = rates * slot_s
        np.add.at(self.weights, (points, bins), num * (1 - shares))
        np.add.at(self.weights, (points + 1, bins), num * shares)
        self.num_calls += float(num.sum())
        self.num_served += float(served.sum())
        self.busy_s += float((surface.at(each, "busy") * self.engines).sum()) * slot_s
        self.hit += float((surface.at(each, "hit_rate") * served).sum())
        self.queue = after
        if self._scaler is not None:
            self._scale(each)

    def _scale(self, each: Floats) -> None:
        """By calls in flight (Little's law), those that wait, and the KV that is wanted again."""
        scaling, surface = self.pool.scaling, self.pool.surface
        assert scaling is not None and self._scaler is not None
        in_flight = (self.engines * each * surface.at(each, "call_s")).sum() + self.queue.sum()
        held = (self.engines * surface.at(each, "held_tokens")).sum()
        load = FleetLoad(
            round(float(in_flight)), float(held), scaling.target_calls, self.pool.kv_tokens
        )
        there = round(self.present) + sum(num for _, num in self._coming)
        wanted = self._scaler.decide(there, load)
        if wanted > there:
            self._coming.append((self.now_s + scaling.start_s, wanted - there))
        elif wanted < there and not self._coming:
            self.present = float(wanted)


@dataclass(frozen=True)
class CellFleet:
    """Pools behind one router, or each behind its own, with a fixed share of the programs."""

    pools: Sequence[Pool]
    num_output: float  # tokens of a call, on average
    failures: Failures = field(default=NO_FAILURES)
    seed: int = 0
    shares: Sequence[float] | None = None  # of each pool, 1 in all; None: one router

    def run(
        self, rates: Sequence[float], slot_s: float = SLOT_S, *, ttft_s: float, tpot_s: float
    ) -> FleetFigures:
        """`rates`: calls a second of all, in each slot; a call is good within both limits."""
        rng = np.random.default_rng(self.seed)
        states = [_PoolState(pool, self.failures, rng) for pool in self.pools]
        for number, rate in enumerate(rates):
            for state in states:
                state.begin_slot(number * slot_s, slot_s)
            for state, given in zip(states, self._divided(states, rate), strict=True):
                state.take(given, slot_s)
        return self._figures(states, len(rates) * slot_s, ttft_s, tpot_s)

    def _divided(self, states: Sequence[_PoolState], rate: float) -> list[Floats]:
        """The rate of each cell."""
        if self.shares is None:
            return _given(states, rate)
        own = zip(states, self.shares, strict=True)
        return [cells for state, share in own for cells in _given([state], share * rate)]

    def _figures(
        self, states: Sequence[_PoolState], duration_s: float, ttft_s: float, tpot_s: float
    ) -> FleetFigures:
        times, weights = _calls_of(states)
        good = (times[:, 0] <= ttft_s) & (times[:, 1] <= tpot_s)
        num_calls = sum(each.num_calls for each in states)
        num_served = sum(each.num_served for each in states)
        num_tokens = num_served * self.num_output
        pools = tuple(
            PoolFigures(
                each.pool.name,
                each.pool.num_replicas,
                each.num_calls / max(1e-9, num_calls),
                each.busy_s / max(1e-9, each.paid_s),
                each.paid_s,
                each.paid_s * each.pool.price_s,
            )
            for each in states
        )
        cost = sum(each.cost for each in pools)
        levels = (0.5, 0.9, 0.99)
        return FleetFigures(
            num_calls,
            num_served,
            num_tokens / duration_s,
            {level: quantile(times[:, 0], weights, level) for level in levels},
            {level: quantile(times[:, 1], weights, level) for level in levels},
            float(weights[good].sum() / max(1e-9, weights.sum())),
            sum(each.hit for each in states) / max(1e-9, num_served),
            cost,
            1e6 * cost / max(1e-9, num_tokens),
            pools,
        )


def _given(states: Sequence[_PoolState], rate: float) -> list[Floats]:
    """The rate of each cell: all expect equally long, or, where there is more than all can serve,
    have the same share more than that."""
    limit = float(sum(state.limits.sum() for state in states))
    if rate >= limit:
        if not limit:  # nobody is there: they wait where most were
            whole = sum(state.sizes.sum() for state in states)
            return [state.sizes * (rate / whole) for state in states]
        return [state.limits * (rate / limit) for state in states]
    low, high = 0.0, 1.0
    while sum(state.rates_at(high).sum() for state in states) < rate and high < _MOST_DELAY_S:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        total = sum(state.rates_at(middle).sum() for state in states)
        low, high = (middle, high) if total < rate else (low, middle)
    found = [state.rates_at(high) for state in states]
    total = float(sum(each.sum() for each in found))
    if total <= 0:
        return [state.limits * (rate / limit) for state in states]
    return [each * (rate / total) for each in found]


def _bin_of(delay_s: Floats) -> npt.NDArray[np.int64]:
    """0: none to speak of."""
    share = np.log(np.maximum(delay_s, 1e-9) / _LEAST_DELAY_S)
    share /= np.log(_MOST_DELAY_S / _LEAST_DELAY_S)
    bins: npt.NDArray[np.int64] = np.clip(np.ceil(share * _MAX_DELAYS), 0, _MAX_DELAYS).astype(int)
    return bins


def _delay_of(number: int) -> float:
    """Seconds, in the middle of a bin by the logarithm."""
    if not number:
        return 0.0
    return float(
        _LEAST_DELAY_S * (_MOST_DELAY_S / _LEAST_DELAY_S) ** ((number - 0.5) / _MAX_DELAYS)
    )


def _calls_of(states: Sequence[_PoolState]) -> tuple[Floats, Floats]:
    """TTFT and TPOT [n, 2] of the calls of all points that were used, and their weights [n]."""
    times, weights = [np.empty((0, 2))], [np.empty(0)]
    for state in states:
        for (point, number), weight in np.ndenumerate(state.weights):
            own = state.pool.surface.points[point].times
            if weight > 0 and len(own):
                times.append(own + [_delay_of(number), 0.0])
                weights.append(np.full(len(own), weight / len(own)))
    return np.concatenate(times), np.concatenate(weights)
