"""A cache of masks for all outputs and requests of a vocabulary, bounded in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from .matcher import Mask

ROW_BYTES = 280  # of a cached mask besides its bits (measured by the growth of a process)


class MaskCache:
    """LRU cache of masks by (grammar, state): one for all grammars of a vocabulary. Thread-safe:
    grammars are bound and followed on different threads."""

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
        """The cached row, which must not be written to, or None."""
        # Without the lock, which takes 0.3 of the 2 us of a warm mask.
        row = self._rows.get(key)
        if row is not None:
            try:
                self._rows.move_to_end(key)
            except KeyError:  # dropped by another thread just now
                return None
        return row

    def put(self, key: int, row: Mask) -> None:
        """Cache a row; it becomes read-only."""
        row.flags.writeable = False
        with self._lock:
            replaced = self._rows.pop(key, None)
            self._rows[key] = row
            self.num_bytes += 0 if replaced is not None else row.nbytes + ROW_BYTES
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= self._rows.popitem(last=False)[1].nbytes + ROW_BYTES
