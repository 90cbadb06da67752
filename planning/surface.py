"""What engines of one kind do at each rate of calls, learned from a few of them simulated exactly:
the response surface from which fleets too large to simulate are computed (cells.py).

A point is one exact run of a cell, a few engines behind the router's own policy, at one rate. Its
calls' times are kept as they are: a mixture of points is then a mixture of their calls.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..cluster.placement.policies import policy_of
from .fleet_simulation import FleetSimulation, Routing
from .mixes import Mix
from .simulated_engine import SimulatedEngine

Floats = npt.NDArray[np.float64]

ROUTING = Routing(lambda: policy_of("program"))
# Of the largest rate that is served: closer together where waiting begins.
_SHARES = (0.03, 0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.88, 0.95)
_WARM_SHARE = 0.4  # of a run, whose calls do not count: the cell fills
_KEPT_UP = 0.95  # of what is sent must be served, or it is more than the engines can
_OVERLOAD = 1.3  # times the largest rate: how its limit is found
_MAX_DOUBLINGS = 12


@dataclass(frozen=True)
class Point:
    """A cell at one rate. Of one engine: `rate` (calls a second that were asked of it while they
    counted: of programs that take long some come later), `expected_tokens` (what the
    router counts it to have to do), `held_tokens` (KV that open programs want again), `busy` (share
    of the time). Of all calls: `times` [num_calls, 2], TTFT and TPOT in seconds."""

    rate: float
    served: float  # calls that ended a second
    times: Floats
    call_s: float  # a call from its arrival to its end, on average
    expected_tokens: float
    held_tokens: float
    busy: float
    hit_rate: float
    missing_tokens: float  # of a call's prompt, computed


@dataclass(frozen=True)
class Cell:
    """How points are found: so many engines, and about so many calls that count."""

    engine: SimulatedEngine
    mix: Mix
    num_engines: int = 8
    num_calls: int = 1200
    least_s: float = 4.0  # of a run, simulated
    seed: int = 0

    def point(self, rate: float) -> Point:
        """Programs of so many calls a second for each engine."""
        total = rate * self.num_engines
        duration_s = max(self.least_s, self.num_calls / total) / (1 - _WARM_SHARE)
        fleet = FleetSimulation([self.engine] * self.num_engines, ROUTING, seed=self.seed)
        begin_s = _WARM_SHARE * duration_s
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
        ends = [each.ended_s for each in fleet.times if each.ended_s >= begin_s]
        # While calls come, or until all have ended: more than can be served may not end before.
        steady = sum(end_s < duration_s for end_s in ends) / (duration_s - begin_s)
        drained = len(ends) / (fleet.now_s - begin_s)
        first, last = seen[0], seen[-1]
        prompt = sum(each.prompt_tokens for each in fleet.replicas)
        num_asked = sum(begin_s <= asked_s < duration_s for asked_s in fleet.asked_s)
        return Point(
            num_asked / (duration_s - begin_s) / self.num_engines,
            max(steady, drained) / self.num_engines,
            np.array([(each.ttft_s, each.tpot_s) for each in counted]).reshape(-1, 2),
            float(np.mean([each.ended_s - each.asked_s for each in counted])) if counted else 0.0,
            float(np.mean([each[0] for each in seen])),
            float(np.mean([each[1] for each in seen])),
            (last[2] - first[2]) / (duration_s - begin_s) / self.num_engines,
            fleet.hit_rate,
            (1 - fleet.hit_rate) * prompt / max(1, fleet.num_calls),
        )

    def largest_rate(self, first_rate: float) -> float:
        """Calls a second that an engine serves where there are always more; from `first_rate`."""
        rate = first_rate
        for _ in range(_MAX_DOUBLINGS):
            point = self.point(rate)
            if point.served < _KEPT_UP * point.rate:
                break
            rate *= 2
        if rate <= _OVERLOAD * point.served:
            return point.served
        return self.point(_OVERLOAD * point.served).served


@dataclass(frozen=True)
class Surface:
    """The points of one kind of engine, by rising rates; `limit`: the largest rate that it
    serves."""

    points: tuple[Point, ...]
    limit: float

    @classmethod
    def learn(cls, cell: Cell, first_rate: float, pool: Executor | None = None) -> Surface:
        """By simulation of the cell, its points in the processes of `pool` where there is one."""
        limit = cell.largest_rate(first_rate)
        rates = [share * limit for share in _SHARES]
        points = map(cell.point, rates) if pool is None else pool.map(cell.point, rates)
        return cls(tuple(points), limit)

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
        return upper - 1, np.clip((rates - low) / (high - low), 0.0, 1.0)


def quantile(values: Floats, weights: Floats, share: float) -> float:
    """Of weighted values; nan where there are none."""
    if not len(values) or weights.sum() <= 0:
        return float("nan")
    order = np.argsort(values)
    sums = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(sums, share * sums[-1])])
