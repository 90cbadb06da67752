"""Which blocks a store has, which was used last, and which one to give up first.

A block whose parent is not there is kept but never found, as `longest` walks from the first block:
when the parent comes back, so does the block. What is given up is the least recently used block
without children, so parents outlive their children. Using a block uses all before it; adding it
does, too.

Knows no files and no threads. Cost: `add`, `touch` O(blocks before it), `remove` O(1), `oldest`
O(1), with `keep` O(blocks before that).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from .block_key import Block


class StoreIndex:
    """The blocks of a store by key. Invariant: a block stands before its parent, so the first one
    has no children."""

    def __init__(self) -> None:
        # each one's parent's key, the least recently used block first
        self._parents: OrderedDict[bytes, bytes | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._parents

    def longest(self, blocks: Sequence[Block]) -> int:
        """How many of these are here, up to the first that is not."""
        parents = self._parents
        for num_found, block in enumerate(blocks):
            if block.key not in parents:
                return num_found
        return len(blocks)

    def add(self, key: bytes, parent: bytes | None) -> None:
        """A block is here; it and those before it are used now."""
        self._parents[key] = parent
        self.touch(key)

    def remove(self, key: bytes) -> None:
        """A block is gone; nothing happens if it was not here."""
        self._parents.pop(key, None)

    def touch(self, key: bytes) -> None:
        """A block and those before it are used now."""
        parents = self._parents
        step: bytes | None = key
        for _ in range(len(parents)):  # ends where a forged file is its own ancestor
            if step is None or step not in parents:
                return
            parents.move_to_end(step)
            step = parents[step]

    def oldest(self, keep: bytes | None = None) -> bytes | None:
        """The block to give up first, other than `keep` and what is before it; None where there is
        no other."""
        for key, parent in self._parents.items():
            if key != keep:
                return key
            keep = parent
        return None

    def in_order(self) -> Iterable[tuple[bytes, bytes | None]]:
        """(key, parent's key), from the least recently used block on."""
        return self._parents.items()

    def keys(self) -> set[bytes]:
        """Of all blocks."""
        return set(self._parents)
