"""Constraints on an array: how many items, what each is, how many match a schema."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .document import Signed, State


@dataclass(frozen=True, slots=True)
class Count:
    """Among the items from `start` up to `stop` (None: the end), between `least` and `most` are
    valid under `item`."""

    start: int
    stop: int | None
    item: Signed
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The items that in-place keywords have evaluated, for `unevaluatedItems`: the first `upto`
    (None: all), and those that are valid under one of `matching`."""

    upto: int | None = 0
    matching: frozenset[Signed] = frozenset()

    def __or__(self, other: Evaluated) -> Evaluated:
        upto = None if self.upto is None or other.upto is None else max(self.upto, other.upto)
        return Evaluated(upto, self.matching | other.matching)


NOTHING_EVALUATED = Evaluated()


@dataclass(frozen=True, slots=True)
class ArrayCase:
    """A conjunction of constraints on an array. `items`: (start, stop, signed), every item from
    `start` up to `stop` (None: the end) is valid under `signed`. `is_unique` None: does not
    matter."""

    items: frozenset[tuple[int, int | None, Signed]] = frozenset()
    counts: frozenset[Count] = frozenset()
    least: int = 0
    most: int | None = None
    is_unique: bool | None = None
    evaluated: Evaluated = field(default=NOTHING_EVALUATED)

    def merged(self, other: ArrayCase) -> ArrayCase | None:
        """Both conjunctions; None where they plainly contradict each other."""
        most = self.most if other.most is None else other.most
        if self.most is not None and other.most is not None:
            most = min(self.most, other.most)
        least = max(self.least, other.least)
        if most is not None and least > most:
            return None
        if None not in (self.is_unique, other.is_unique) and self.is_unique != other.is_unique:
            return None
        return ArrayCase(
            self.items | other.items,
            self.counts | other.counts,
            least,
            most,
            other.is_unique if self.is_unique is None else self.is_unique,
            self.evaluated | other.evaluated,
        )

    def item_state(self, index: int) -> State:
        """The constraints on the item at an index."""
        return frozenset(
            signed
            for start, stop, signed in self.items
            if start <= index and (stop is None or index < stop)
        )

    @property
    def boundary(self) -> int:
        """From this index on all items have the same constraints."""
        spans = [*((start, stop) for start, stop, _ in self.items)]
        spans += [(count.start, count.stop) for count in self.counts]
        return max((end for span in spans for end in span if end is not None), default=0)

    def forgetting(self) -> ArrayCase:
        """The case without its record of evaluated items."""
        return (
            self
            if self.evaluated == NOTHING_EVALUATED
            else replace(self, evaluated=NOTHING_EVALUATED)
        )


ANY = ArrayCase()
