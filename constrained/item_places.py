"""Where in a document arrays must not repeat an item, by the path to them: plain data.

An automaton over the paths of a document. At each place it knows which arrays have `uniqueItems`,
and, where they are few, the texts that an item may have there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

NOWHERE, ROOT = 0, 1


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """What holds for an array or object at a place. Items by index, the last entry being for all
    further ones."""

    is_unique: bool = False
    words: tuple[tuple[str, ...] | None, ...] = (None,)  # an item's texts; None: too many to list
    items: tuple[int, ...] = (NOWHERE,)  # the items' own places
    keys: Mapping[str, int] = field(default_factory=dict)  # the places of values
    others: int = NOWHERE  # of the values of other keys

    def __deepcopy__(self, memo: dict[int, object]) -> ItemPlace:
        return self  # never changes: positions that are copied share it

    def item(self, index: int) -> int:
        """The place of an item."""
        return self.items[min(index, len(self.items) - 1)]

    def words_at(self, index: int) -> tuple[str, ...] | None:
        """The texts that an item may have; None: too many to list."""
        return self.words[min(index, len(self.words) - 1)]


ItemPlaces: TypeAlias = tuple[ItemPlace, ...]
"""By number; NOWHERE is a place below which no array has unique items, ROOT the document."""
