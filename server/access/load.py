"""How many samples of HTTP requests are under way, whose they are, and when there will be room."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from ...shared_limit import SharedLimit, most_of_one
from ..protocol.failures import RATE_LIMIT, Refusal
from .rates import KeyUsage, retry_after

MAX_WAIT_S = 60.0
NO_RATE_WAIT_S = 1.0  # before any sample has ended (guess)
NUM_ENDS = 64  # the rate is taken from this many recent ends


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many samples may be under way: run by the engine at once, and waiting for it."""

    num_running: int
    num_queued: int

    @property
    def num_samples(self) -> int:
        """All together."""
        return self.num_running + self.num_queued

    @property
    def most_of_one(self) -> int:
        """Of one tenant while no other has any."""
        return most_of_one(self.num_samples, self.num_running)


class Load:
    """Samples under way, by tenant. Each tenant may have its part of those that run at once, and of
    the rest as many as it leaves free (`shared_limit.py`)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)
        self._samples = SharedLimit()

    @property
    def num_samples(self) -> int:
        """Of all tenants."""
        return self._samples.num_used

    def enter(self, tenant: Hashable, num_samples: int, capacity: Capacity) -> None:
        """Add samples. Raises Refusal where the tenant may not have so many more now."""
        limit, base = capacity.num_samples, capacity.num_running
        missing = self._samples.num_missing(tenant, num_samples, limit, base)
        if missing:
            wait_s = self.wait_s(missing)
            own = self._samples.used_by(tenant)
            raise Refusal(
                429,
                f"{self.num_samples} samples run or wait, {own} of them yours, and {limit} may; "
                f"each may have as many as are left free; try again in {wait_s:.3g} s",
                kind=RATE_LIMIT,
                code="queue_full",
                headers=retry_after(wait_s),
            )
        self._samples.take(tenant, num_samples)

    def note_end(self) -> None:
        """A sample has ended by itself."""
        self._ends.append(self._clock())

    def leave(self, tenant: Hashable, num_samples: int) -> None:
        """Remove samples that are no longer under way."""
        self._samples.give_back(tenant, num_samples)

    def wait_s(self, num_samples: int) -> float:
        """Seconds until that many samples have ended, at the rate of the recent ends."""
        if not self._ends:
            return NO_RATE_WAIT_S
        seconds = max(self._clock() - self._ends[0], 1e-3)
        return min(MAX_WAIT_S, num_samples * seconds / len(self._ends))


@dataclass(slots=True)
class Ticket:
    """One request's share of the load and of its key's limits, given back when it ends.

    Lifetime: from admission by the middleware until the response is sent or the client is gone;
    what the engine reports later is charged all the same.
    """

    load: Load
    tenant: Hashable = None  # whose samples they are
    usage: KeyUsage | None = None
    num_samples: int = 0
    is_over: bool = False

    def take(self, num_samples: int, capacity: Capacity) -> None:
        """Reserve the request's samples. Raises Refusal."""
        self.load.enter(self.tenant, num_samples, capacity)
        self.num_samples += num_samples

    def charge(self, num_tokens: int) -> None:
        """Tokens that one of its programs has used, in the end."""
        if self.usage is not None:
            self.usage.charge(num_tokens, time.monotonic())

    def release(self) -> None:
        """The request is over."""
        self.load.leave(self.tenant, self.num_samples)
        self.num_samples = 0
        if self.usage is not None and not self.is_over:
            self.usage.end()
        self.is_over = True
