"""A bounded share of time for work that may be left out."""

from __future__ import annotations

from collections.abc import Callable


class TimeCredit:
    """Seconds that may be spent: `burst_s` at first and at most, and so large a share of all time.
    What is begun with some left is done to its end, so that it may be below 0."""

    def __init__(self, share: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._share = share
        self._burst_s = self._left_s = burst_s
        self._clock = clock
        self._at_s = clock()

    @property
    def is_left(self) -> bool:
        """Whether more may be begun."""
        self._earn()
        return self._left_s > 0.0

    def spend(self, seconds: float) -> None:
        """So long was taken; a negative time is given back."""
        self._earn()
        self._left_s -= seconds

    def _earn(self) -> None:
        now_s = self._clock()
        self._left_s = min(self._burst_s, self._left_s + self._share * (now_s - self._at_s))
        self._at_s = now_s
