"""A limit that several share, so that none of them can use it up alone.

Whoever asks may have as much as is then still free: the dynamic threshold of Choudhury and Hahne
("Dynamic queue length thresholds for shared-memory packet switches", IEEE/ACM ToN 6(2), 1998) with
a factor of 1. One alone may have half of the limit; beside k as greedy ones each has 1 / (k + 1),
and as much is free for the next one that comes. What was given is not taken away: who has more than
that, since others have come, is refused until enough of it was given back.
"""

from __future__ import annotations

from collections.abc import Hashable


class SharedLimit:
    """Owns who has how much of a limit. Invariant: amounts are above 0 and add up to `num_used`.

    The limit is stated at each question, since it may depend on what is served.
    """

    def __init__(self) -> None:
        self.num_used = 0
        self._used_by: dict[Hashable, int] = {}

    def used_by(self, owner: Hashable) -> int:
        """What an owner has."""
        return self._used_by.get(owner, 0)

    def num_missing(self, owner: Hashable, num: int, limit: int, base: int = 1) -> int:
        """How much must be given back until the owner may have `num` more; 0: it may now.

        `base`, in [1, limit]: each may have an equal part of this much, however little is free
        beside it.
        """
        held = self.used_by(owner) + num
        free = limit - self.num_used - num
        part = max(1, base // (len(self._used_by) + (owner not in self._used_by)))
        if free >= 0 and held <= max(part, free):
            return 0
        own = min(held - part, -(-(held - free) // 2))  # what it gives back is free, too
        return max(own, -free)

    def take(self, owner: Hashable, num: int) -> None:
        """The owner has `num` more."""
        if num:
            self._used_by[owner] = self.used_by(owner) + num
            self.num_used += num

    def give_back(self, owner: Hashable, num: int) -> None:
        """The owner has `num` less."""
        self.num_used -= num
        left = self.used_by(owner) - num
        assert left >= 0, f"{owner!r} gives back {num} of {left + num}"
        if left:
            self._used_by[owner] = left
        else:
            self._used_by.pop(owner, None)


def most_of_one(limit: int, base: int = 1) -> int:
    """What one alone may have of a limit."""
    return max(base, limit // 2)
