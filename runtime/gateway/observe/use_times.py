"""When the radix tree's use counter had which value: turns a node's `last_use` into seconds."""

from __future__ import annotations

from bisect import bisect_left

MAX_TIMES = 4096  # at most one a second while nobody watches: more than an hour


class UseTimes:
    """Owns (uses so far, seconds) pairs, both rising; the oldest are dropped."""

    def __init__(self) -> None:
        self._uses: list[int] = []
        self._times_s: list[float] = []

    def note(self, num_uses: int, now_s: float) -> None:
        """Record that `num_uses` uses were made by `now_s`."""
        if self._uses and self._uses[-1] == num_uses:
            return
        self._uses.append(num_uses)
        self._times_s.append(now_s)
        if len(self._uses) > 2 * MAX_TIMES:
            del self._uses[:-MAX_TIMES]
            del self._times_s[:-MAX_TIMES]

    def when_s(self, use: int) -> float | None:
        """When a use was made, or a little later; None if that is not recorded yet."""
        index = bisect_left(self._uses, use)
        return self._times_s[index] if index < len(self._times_s) else None
