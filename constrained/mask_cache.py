"""Masks once found, kept for all outputs and requests of a vocabulary, within a bound of memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .matcher import Mask


class MaskCache:
    """Masks of (grammar, state), least recently used first out: one for all grammars of a
    vocabulary. Any thread may use it: grammars are bound on others than they are followed on."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._rows: OrderedDict[int, Mask] = OrderedDict()
        self._num_grammars = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def new_grammar(self) -> int:
        """The first of 2**32 keys, one for each state of a grammar."""
        with self._lock:
            self._num_grammars += 1
            return self._num_grammars << 32

    def get(self, key: int) -> Mask | None:
        """A row that must not be written to."""
        try:  # without the lock, which takes 0.3 of the 2 us of a warm mask
            self._rows.move_to_end(key)
            return self._rows[key]
        except KeyError:
            return None

    def put(self, key: int, row: Mask) -> None:
        """Keep a row; it becomes read-only."""
        row.flags.writeable = False
        with self._lock:
            replaced = self._rows.pop(key, None)
            self._rows[key] = row
            self.num_bytes += row.nbytes - (0 if replaced is None else replaced.nbytes)
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._rows.popitem(last=False)[1].nbytes
