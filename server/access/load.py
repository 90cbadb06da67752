"""How many samples of HTTP requests are under way, and when there will be room for more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.failures import RATE_LIMIT, Refusal
from .rates import KeyUsage, retry_after

MAX_WAIT_S = 60.0
NO_RATE_WAIT_S = 1.0  # before any sample has ended (guess)
NUM_ENDS = 64  # the rate is taken from this many recent ends


class Load:
    """Samples under way. Invariant: 0 <= num_samples, and 0 when no request is open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)
        self.num_samples = 0

    def enter(self, num_samples: int, capacity: int) -> None:
        """Add samples. Raises Refusal where more than `capacity` would be under way."""
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
        """Remove samples that are no longer under way."""
        self.num_samples -= num_samples

    def wait_s(self, num_samples: int) -> float:
        """Seconds until that many samples have ended, at the rate of the recent ends."""
        if not self._ends:
            return NO_RATE_WAIT_S
        seconds = max(self._clock() - self._ends[0], 1e-3)
        return min(MAX_WAIT_S, num_samples * seconds / len(self._ends))


@dataclass(slots=True)
class Ticket:
    """One request's share of the load and of its key's limits, given back when it ends.

    Lifetime: from admission by the middleware until the response is sent or the client is gone.
    """

    load: Load
    usage: KeyUsage | None = None
    num_samples: int = 0

    def take(self, num_samples: int, capacity: int) -> None:
        """Reserve the request's samples. Raises Refusal."""
        self.load.enter(num_samples, capacity)
        self.num_samples += num_samples

    def note_outcome(self, num_tokens: int) -> None:
        """One of its samples has ended; its own tokens, the prompt's counted once."""
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
