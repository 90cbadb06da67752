"""Which blocks a store has, which was used last, and which one to give up first.

A block whose parent is not there is kept but never found, as `longest` walks from the first block:
when the parent comes back, so does the block. What is given up is the least recently used block
without children, so parents outlive their children. Using a block uses all before it.

Knows no files and no threads. Cost: `add`, `remove` O(1), `touch` O(blocks before it), `oldest`
O(log n) for each use since it was last asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from .block_key import Block


@dataclass(slots=True)
class _Entry:
    parent: bytes | None
    last_use: int  # higher is later


class StoreIndex:
    """The blocks of a store by key."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._num_children: Counter[bytes] = Counter()  # of blocks that are here, by parent's key
        self._leaves: list[tuple[int, bytes]] = []  # heap; each leaf at least once, some no longer
        self._now = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def longest(self, blocks: Sequence[Block]) -> int:
        """How many of these are here, up to the first that is not."""
        entries = self._entries
        for num_found, block in enumerate(blocks):
            if block.key not in entries:
                return num_found
        return len(blocks)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """A block is here; it counts as used now, without those before it."""
        self._now += 1
        entry = self._entries.get(key)
        if entry is not None:
            entry.last_use = self._now
            return
        self._entries[key] = _Entry(parent, self._now)
        if parent is not None:
            self._num_children[parent] += 1
        self._note_leaf(key)

    def remove(self, key: bytes) -> None:
        """A block is gone; nothing happens if it was not here."""
        entry = self._entries.pop(key, None)
        if entry is None or entry.parent is None:
            return
        self._num_children[entry.parent] -= 1
        if not self._num_children[entry.parent]:
            del self._num_children[entry.parent]
            self._note_leaf(entry.parent)

    def touch(self, key: bytes) -> None:
        """A block and those before it are used now."""
        self._now += 1
        step: bytes | None = key
        while step is not None:
            entry = self._entries.get(step)
            if entry is None or entry.last_use == self._now:
                return
            entry.last_use = self._now
            step = entry.parent

    def oldest(self, keep: bytes | None = None) -> bytes | None:
        """The block to give up first, other than `keep`; None where there is no other."""
        kept = None
        found = None
        while self._leaves and found is None:
            last_use, key = heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is None or key in self._num_children:
                continue  # a parent comes back when its last child goes
            if entry.last_use != last_use:
                heappush(self._leaves, (entry.last_use, key))
            elif key == keep:
                kept = (last_use, key)
            else:
                found = (last_use, key)
        for item in (kept, found):
            if item is not None:
                heappush(self._leaves, item)
        return None if found is None else found[1]

    def in_order(self) -> Iterator[tuple[bytes, bytes | None]]:
        """(key, parent's key), from the least recently used block on."""
        items = sorted(self._entries.items(), key=lambda item: item[1].last_use)
        return ((key, entry.parent) for key, entry in items)

    def keys(self) -> set[bytes]:
        """Of all blocks."""
        return set(self._entries)

    def _note_leaf(self, key: bytes) -> None:
        entry = self._entries.get(key)
        if entry is None or key in self._num_children:
            return
        heappush(self._leaves, (entry.last_use, key))
        if len(self._leaves) > 2 * len(self._entries) + 64:  # most are no longer here
            leaves = self._entries.keys() - self._num_children.keys()
            self._leaves = [(self._entries[leaf].last_use, leaf) for leaf in leaves]
            heapify(self._leaves)
