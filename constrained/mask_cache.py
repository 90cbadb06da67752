"""Masks once found, kept for all outputs and requests of a vocabulary, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict

from .matcher import Mask


class MaskCache:
    """Masks of (grammar, state), least recently used first out: one for all grammars of a
    vocabulary. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: OrderedDict[int, Mask] = OrderedDict()
        self._num_grammars = 0

    def __len__(self) -> int:
        return len(self._rows)

    def new_grammar(self) -> int:
        """The first of 2**32 keys, one for each state of a grammar."""
        self._num_grammars += 1
        return self._num_grammars << 32

    def get(self, key: int) -> Mask | None:
        """A row that must not be written to."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def put(self, key: int, row: Mask) -> None:
        """Keep a row; it becomes read-only."""
        row.flags.writeable = False
        self._rows[key] = row
        self.num_bytes += row.nbytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._rows.popitem(last=False)[1].nbytes
