"""The paths of a schema's documents, as far as `uniqueItems` has to be enforced at run time.

While rules are written each state notes what its arrays and objects lead to. The subset
construction makes of it an automaton that tells by path alone. Where one branch of a schema wants
unique items and another does not, a path cannot tell which of them the text follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..item_places import NOWHERE, ROOT, ItemPlace, ItemPlaces
from .document import State

MAX_PLACES = 5000  # guess: far more than schemas have


@dataclass(slots=True)
class ArrayPaths:
    """One case of an array. `items`: (start, stop, state) of the items from an index up to another
    (None: the end). `is_unique` None: no array of the case repeats an item anyway. `words`: see
    `ItemPlace`."""

    items: list[tuple[int, int | None, State]] = field(default_factory=list)
    is_unique: bool | None = False
    words: tuple[tuple[str, ...] | None, ...] = (None,)

    @property
    def boundary(self) -> int:
        """From this index on all items lead to the same."""
        ends = [end for start, stop, _ in self.items for end in (start, stop) if end is not None]
        return max(len(self.words) - 1, *ends, 0)

    def states(self, index: int) -> Iterator[State]:
        """What the item at an index leads to."""
        for start, stop, state in self.items:
            if start <= index and (stop is None or index < stop):
                yield state


@dataclass(slots=True)
class ObjectPaths:
    """One case of an object: what the listed keys lead to, and what the free ones (None) do."""

    listed: frozenset[str]
    members: list[tuple[str | None, State]] = field(default_factory=list)

    def states(self, key: str | None) -> Iterator[State]:
        """What the value of a key leads to; None: of one that no case lists."""
        wanted = key if key in self.listed else None
        return (state for name, state in self.members if name == wanted)


Paths: TypeAlias = Mapping[State, Sequence[ArrayPaths | ObjectPaths]]
_Subset: TypeAlias = frozenset[State]


class TooManyPlaces(Exception):
    """The automaton over paths is too large."""


def item_places(
    paths: Paths, root: State, *, keeps_both: bool, on_conflict: Callable[[State], None]
) -> ItemPlaces | None:
    """The automaton; None where no array has to be watched.

    `on_conflict` is told of each place where branches differ. There `keeps_both`: items may repeat,
    since one of the branches allows it; else they may not. Raises TooManyPlaces.
    """
    if not any(
        isinstance(case, ArrayPaths) and case.is_unique
        for cases in paths.values()
        for case in cases
    ):
        return None
    builder = _Builder(paths, keeps_both, on_conflict)
    return builder.places(root)


class _Builder:
    def __init__(
        self, paths: Paths, keeps_both: bool, on_conflict: Callable[[State], None]
    ) -> None:
        self._paths = paths
        self._keeps_both = keeps_both
        self._on_conflict = on_conflict
        self._numbers: dict[_Subset, int] = {}
        self._queue: list[_Subset] = []

    def places(self, root: State) -> ItemPlaces | None:
        found = {NOWHERE: ItemPlace()}
        self._number([root])
        while self._queue:
            subset = self._queue.pop()
            found[self._numbers[subset]] = self._place(subset)
        return _pruned(tuple(found[number] for number in sorted(found)))

    def _number(self, states: Iterable[State]) -> int:
        subset = frozenset(state for state in states if state in self._paths)
        if not subset:
            return NOWHERE
        if subset not in self._numbers:
            if len(self._numbers) == MAX_PLACES:
                raise TooManyPlaces(f"more than {MAX_PLACES} places of arrays to be watched")
            self._numbers[subset] = ROOT + len(self._numbers)
            self._queue.append(subset)
        return self._numbers[subset]

    def _place(self, subset: _Subset) -> ItemPlace:
        cases = [case for state in sorted(subset, key=sorted) for case in self._paths[state]]
        arrays = [case for case in cases if isinstance(case, ArrayPaths)]
        objects = [case for case in cases if isinstance(case, ObjectPaths)]
        names = dict.fromkeys(name for case in objects for name in sorted(case.listed))
        boundary = max((case.boundary for case in arrays), default=0)
        is_unique = any(case.is_unique for case in arrays)
        is_mixed = is_unique and any(case.is_unique is False for case in arrays)
        if is_mixed:
            self._on_conflict(min(subset, key=sorted))
            is_unique = not self._keeps_both
        return ItemPlace(
            is_unique=is_unique,
            words=(None,) if is_mixed or not is_unique else _words(arrays, boundary),
            items=tuple(
                self._number(state for case in arrays for state in case.states(index))
                for index in range(boundary + 1)
            ),
            keys={
                name: self._number(state for case in objects for state in case.states(name))
                for name in names
            },
            others=self._number(state for case in objects for state in case.states(None)),
        )


def _words(arrays: list[ArrayPaths], boundary: int) -> tuple[tuple[str, ...] | None, ...]:
    found: list[tuple[str, ...] | None] = []
    for index in range(boundary + 1):
        each = [case.words[min(index, len(case.words) - 1)] for case in arrays]
        known = [words for words in each if words is not None]
        union = dict.fromkeys(word for words in known for word in words)
        found.append(tuple(union) if len(known) == len(each) else None)
    return tuple(found)


def _pruned(places: ItemPlaces) -> ItemPlaces | None:
    """Without the places below which nothing is unique; None where the root is one of them."""
    users: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        for inner in (*place.items, *place.keys.values(), place.others):
            users.setdefault(inner, []).append(number)
    pending = [number for number, place in enumerate(places) if place.is_unique]
    kept = set(pending)
    while pending:
        for user in users.get(pending.pop(), ()):
            if user not in kept:
                kept.add(user)
                pending.append(user)
    if ROOT not in kept:
        return None
    new = {old: ROOT + i for i, old in enumerate(sorted(kept))}
    return (
        ItemPlace(),
        *(
            replace(
                place,
                items=tuple(new.get(inner, NOWHERE) for inner in place.items),
                keys={name: new.get(inner, NOWHERE) for name, inner in place.keys.items()},
                others=new.get(place.others, NOWHERE),
            )
            for place in (places[old] for old in sorted(kept))
        ),
    )
