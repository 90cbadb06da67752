"""What engines of one kind do at each rate of calls, learned from a few of them simulated exactly:
the response surface from which fleets too large to simulate are computed (cells.py).

A point is one exact run of a cell, a few engines behind the router's own policy, at one rate. Its
calls' times are kept as they are: a mixture of points is then a mixture of their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from ..cluster.placement.policies import policy_of
from .fleet_simulation import FleetSimulation, Routing
from .mixes import Mix
from .simulated_engine import SimulatedEngine

Floats = npt.NDArray[np.float64]

ROUTING = Routing(partial(policy_of, "program"))  # a cell goes to other processes
# Of the largest rate that is served: closer together where waiting begins.
_SHARES = (0.03, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.88, 0.95)
_WARM_SHARE = 0.4  # of a run, whose calls do not count: the cell fills
_KEPT_UP = 0.95  # of what is sent must be served, or it is more than the engines can
_FLOOD = 2.5  # times a rate that they keep up with: more than they can
_MAX_DOUBLINGS = 12
_ROUGHLY = 4  # times fewer calls while a rate is looked for


@dataclass(frozen=True)
class Point:
    """A cell at one rate. Of one engine: `rate` (calls a second that were asked of it while they
    counted: some come later, of programs that take long, and arrivals at random are a few percent
    more or less than was meant), `expected_tokens` (what the router counts it to have to do),
    `held_tokens` (KV that open programs want again), `busy` (share of the time). Of all calls:
    `times` [num_calls, 2], TTFT and TPOT in seconds."""

    rate: float
    served: float  # calls that had their first token a second
    times: Floats
    call_s: float  # a call from its arrival to its end, on average
    expected_tokens: float
    held_tokens: float
    busy: float
    hit_rate: float
    missing_tokens: float  # of a call's prompt, computed

    @property
    def keeps_up(self) -> bool:
        """Whether about as many calls begin to be answered as come. Not as end: while a mix of
        many turns has not filled the cell yet, ends come behind by a call's length."""
        return self.served >= _KEPT_UP * self.rate


@dataclass(frozen=True)
class Cell:
    """How points are found: so many engines, and about so many calls that count. `routing`: of
    the calls among them."""

    engine: SimulatedEngine
    mix: Mix
    num_engines: int = 8
    num_calls: int = 1200
    least_s: float = 4.0  # of a run, simulated
    seed: int = 0
    routing: Routing = ROUTING

    def point(self, rate: float) -> Point:
        """Programs of so many calls a second for each engine."""
        total = rate * self.num_engines
        duration_s = max(self.least_s, self.num_calls / total) / (1 - _WARM_SHARE)
        begin_s = _WARM_SHARE * duration_s
        fleet = self._fleet()
        seen: list[tuple[float, float, float]] = []

        def look() -> None:
            loads = [replica.load for replica in fleet.replicas]
            expected = float(np.mean([each.expected_tokens for each in loads]))
            held = float(np.mean([each.held_tokens for each in loads]))
            seen.append((expected, held, sum(each.busy_s for each in fleet.replicas)))

        for number in range(33):
            fleet.at(begin_s + number / 32 * (duration_s - begin_s), look)
        fleet.run(self.mix.starts(self.seed, total, duration_s), counted_s=duration_s)
        counted = [each for each in fleet.times if begin_s <= each.asked_s < duration_s]
        first, last = seen[0], seen[-1]
        prompt = sum(each.prompt_tokens for each in fleet.replicas)
        return Point(
            self._each_s(fleet.asked_s, begin_s, duration_s),
            self._each_s([each.first_s for each in fleet.times], begin_s, duration_s),
            np.array([(each.ttft_s, each.tpot_s) for each in counted]).reshape(-1, 2),
            float(np.mean([each.ended_s - each.asked_s for each in counted])) if counted else 0.0,
            float(np.mean([each[0] for each in seen])),
            float(np.mean([each[1] for each in seen])),
            (last[2] - first[2]) / (duration_s - begin_s) / self.num_engines,
            fleet.hit_rate,
            (1 - fleet.hit_rate) * prompt / max(1, fleet.num_calls),
        )

    def largest_rate(self, first_rate: float) -> float:
        """Calls a second that an engine serves where there are always more; looked for from
        `first_rate` on."""
        rough = replace(self, num_calls=-(-self.num_calls // _ROUGHLY))
        rate, factor = first_rate, 2.0 if rough.point(first_rate).keeps_up else 0.5
        for _ in range(_MAX_DOUBLINGS):
            keeps_up = rough.point(factor * rate).keeps_up
            if keeps_up or factor < 1:
                rate *= factor
            if keeps_up == (factor < 1):
                break
        return self._flooded(rate)

    def _flooded(self, rate: float) -> float:
        """What it serves of more than it can, after a time at a rate that it keeps up with.
        NOTE: flooded from its start an engine serves more. It has learned from no step what its
        decode rows take alone, and lets prompts delay them without limit."""
        total = _FLOOD * rate * self.num_engines
        flood_s = max(self.least_s, _FLOOD * self.num_calls / total)
        begin_s = _WARM_SHARE / (1 - _WARM_SHARE) * flood_s
        duration_s, slow_s = begin_s + flood_s, begin_s / _FLOOD
        starts = [
            replace(
                each,
                at_s=_FLOOD * each.at_s if each.at_s < slow_s else begin_s + each.at_s - slow_s,
            )
            for each in self.mix.starts(self.seed, total, slow_s + flood_s)
        ]
        fleet = self._fleet()
        fleet.run(starts, duration_s)
        ends = [each.ended_s for each in fleet.times]
        return self._each_s(ends, begin_s + flood_s / 2, duration_s)

    def _fleet(self) -> FleetSimulation:
        return FleetSimulation([self.engine] * self.num_engines, self.routing, seed=self.seed)

    def _each_s(self, times: Sequence[float], begin_s: float, end_s: float) -> float:
        """How many of these times are between the two, a second and an engine."""
        num = sum(begin_s <= each < end_s for each in times)
        return num / (end_s - begin_s) / self.num_engines


@dataclass(frozen=True)
class Surface:
    """The points of one kind of engine, by rising rates; `limit`: the largest rate that cells are
    taken to serve."""

    points: tuple[Point, ...]
    limit: float

    @classmethod
    def learn(cls, cell: Cell, limit: float, pool: Executor | None = None) -> Surface:
        """By simulation of the cell, its points in the processes of `pool` where there is one.
        `limit`: the cell's largest rate, or one around which to learn."""
        rates = [share * limit for share in _SHARES]
        points = map(cell.point, rates) if pool is None else pool.map(cell.point, rates)
        return cls(tuple(sorted(points, key=lambda each: each.rate)), limit)

    @cached_property
    def rates(self) -> Floats:
        """Of all points."""
        return np.array([each.rate for each in self.points])

    def at(self, rates: Floats, name: str) -> Floats:
        """A field of Point at these rates."""
        values = [getattr(each, name) for each in self.points]
        found: Floats = np.interp(rates, [0.0, *self.rates], [0.0, *values])
        return found

    @cached_property
    def waiting(self) -> tuple[Floats, Floats]:
        """Tokens before a call's first one, as the router counts them, by rising rates: the same
        rule that places programs (cluster/placement/policies.py)."""
        rates = np.array([0.0, *self.rates, self.limit])
        first = self.points[0]
        found = [each.missing_tokens + each.expected_tokens for each in self.points]
        tokens = np.array([first.missing_tokens, *found, 1.5 * found[-1]])
        rising = np.maximum.accumulate(tokens) + np.arange(len(tokens)) * 1e-6
        return rates, rising

    def shares(self, rates: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        """Of which point a rate's calls are, and the share of them that are of the next one."""
        upper = np.clip(np.searchsorted(self.rates, rates), 1, len(self.rates) - 1)
        low, high = self.rates[upper - 1], self.rates[upper]
        return upper - 1, np.clip((rates - low) / np.maximum(1e-9, high - low), 0.0, 1.0)


def quantile(values: Floats, weights: Floats, share: float) -> float:
    """Of weighted values; nan where there are none."""
    if not len(values) or weights.sum() <= 0:
        return float("nan")
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, share * sums[-1])])
