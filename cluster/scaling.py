"""How many replicas there should be: by the calls in flight and by the KV that programs want again.

The rule is Ray Serve's ("target ongoing requests", with a delay each way), with the working set
beside the queue: agents that wait for their tools have no call and still need their KV.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from .replica import Replica

FULL_SHARE = 0.9  # of a replica's KV, from which on it counts as full


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What is wanted of all replicas together, and what one of them has."""

    num_calls: int  # in flight, or waiting for a replica
    held_tokens: float  # KV that open programs want again
    calls_each: float  # that one replica is to have in flight
    tokens_each: float  # KV of one; 0: not known yet

    def num_wanted(self) -> int:
        """Replicas, at least one."""
        by_calls = self.num_calls / self.calls_each
        by_tokens = self.held_tokens / (self.tokens_each * FULL_SHARE) if self.tokens_each else 0.0
        return max(1, ceil(max(by_calls, by_tokens)))


class Scaler:
    """Follows what is wanted: up once that was so for `up_s`, down for `down_s`; never by less than
    was wanted at any time since."""

    def __init__(
        self,
        least: int,
        most: int,
        *,
        up_s: float,
        down_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Between `least` and `most` replicas."""
        self._least, self._most = least, most
        self._up_s, self._down_s = up_s, down_s
        self._clock = clock
        self._above: tuple[float, int] | None = None  # since when, and the least wanted since then
        self._below: tuple[float, int] | None = None  # since when, and the most

    def decide(self, num_replicas: int, load: FleetLoad) -> int:
        """How many there should be now, of `num_replicas` that are there or on their way."""
        wanted = min(self._most, max(self._least, load.num_wanted()))
        now_s = self._clock()
        if wanted > num_replicas:
            since_s, least = self._above or (now_s, wanted)
            least = min(least, wanted)
            is_due = now_s - since_s >= self._up_s
            self._above, self._below = None if is_due else (since_s, least), None
            return max(num_replicas, least) if is_due else num_replicas
        if wanted < num_replicas:
            since_s, most = self._below or (now_s, wanted)
            most = max(most, wanted)
            is_due = now_s - since_s >= self._down_s
            self._above, self._below = None, None if is_due else (since_s, most)
            return min(num_replicas, most) if is_due else num_replicas
        self._above = self._below = None
        return num_replicas


@dataclass(frozen=True, slots=True)
class Scaling:
    """When a router has more replicas or fewer, and where new ones come from."""

    scaler: Scaler
    hire: Callable[[int], Replica]  # makes one of this number; it is not started yet
    target_calls: float | None  # that one is to have in flight; None: half of what it can run
