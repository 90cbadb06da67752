"""How many samples the engine was asked for over HTTP, and when there will be room for more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.failures import RATE_LIMIT, Refusal
from .rates import KeyUsage, retry_after

MAX_WAIT_S = 60.0
NO_RATE_WAIT_S = 1.0  # before anything has ended (guess)
NUM_ENDS = 64  # of the last samples, from which the rate is taken


class Load:
    """Samples under way. Invariant: 0 <= num_samples, and 0 when no request is open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)
        self.num_samples = 0

    def enter(self, num_samples: int, capacity: int) -> None:
        """Raises Refusal where more than `capacity` would be under way."""
        over = self.num_samples + num_samples - capacity
        if over > 0:
            wait_s = self.wait_s(over)
            raise Refusal(
                429,
                f"{self.num_samples} samples run or wait and {capacity} may; "
                f"try again in {wait_s:.3g} s",
                kind=RATE_LIMIT,
                code="queue_full",
                headers=retry_after(wait_s),
            )
        self.num_samples += num_samples

    def note_end(self) -> None:
        """A sample has ended by itself."""
        self._ends.append(self._clock())

    def leave(self, num_samples: int) -> None:
        """They are under way no more."""
        self.num_samples -= num_samples

    def wait_s(self, num_samples: int) -> float:
        """Until so many have ended, by the rate of the last ones up to now."""
        if not self._ends:
            return NO_RATE_WAIT_S
        seconds = max(self._clock() - self._ends[0], 1e-3)
        return min(MAX_WAIT_S, num_samples * seconds / len(self._ends))


@dataclass(slots=True)
class Ticket:
    """What one request has taken of the load and of its key's limits, given back when it ends.

    Lifetime: from when the gate lets the request in until its answer is sent, or its client gone.
    """

    load: Load
    usage: KeyUsage | None = None
    num_samples: int = 0

    def take(self, num_samples: int, capacity: int) -> None:
        """It asks for so many samples. Raises Refusal."""
        self.load.enter(num_samples, capacity)
        self.num_samples += num_samples

    def note_outcome(self, num_tokens: int) -> None:
        """One of its samples has ended; tokens of its own, its prompt's once."""
        self.load.note_end()
        if self.usage is not None:
            self.usage.charge(num_tokens, time.monotonic())

    def release(self) -> None:
        """The request is over."""
        self.load.leave(self.num_samples)
        self.num_samples = 0
        if self.usage is not None:
            self.usage.end()
            self.usage = None
