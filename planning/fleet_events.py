"""What happens to a simulated fleet beside its calls: replicas fail, are slow, come and go."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from ..cluster.scaling import Scaler


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica ends then, with its KV, and is there again from `until_s` on, with nothing."""

    replica: int
    at_s: float
    until_s: float = inf


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A straggler: meanwhile its steps take `factor` times as long."""

    replica: int
    at_s: float
    until_s: float
    factor: float


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """As the flags of `stemma serve --max-replicas`; the most is the fleet's number of engines."""

    least: int
    most: int
    target_calls: float  # that a replica is to have in flight
    up_s: float = 30.0
    down_s: float = 600.0
    start_s: float = 60.0  # from asking for a replica until it takes programs (guess)

    def scaler(self, clock: Callable[[], float]) -> Scaler:
        """The router's own rule, on this clock."""
        return Scaler(self.least, self.most, up_s=self.up_s, down_s=self.down_s, clock=clock)


@dataclass(frozen=True, slots=True)
class FleetEvents:
    """All of a run."""

    outages: tuple[Outage, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    scaling: Autoscaling | None = None


NO_EVENTS = FleetEvents()


def random_outages(
    num_replicas: int, duration_s: float, *, mean_s: float, repair_s: float, seed: int = 0
) -> tuple[Outage, ...]:
    """Each replica fails once in `mean_s` on average, independently, and is away for `repair_s`."""
    rng = random.Random(seed)
    outages = []
    for replica in range(num_replicas):
        at_s = rng.expovariate(1.0 / mean_s)
        while at_s < duration_s:
            outages.append(Outage(replica, at_s, at_s + repair_s))
            at_s += repair_s + rng.expovariate(1.0 / mean_s)
    return tuple(outages)
