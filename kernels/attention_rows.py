"""The KV that each row of a step attends to: host-side integers, made once a step.

    row r's queries:  tokens query_start[r] .. query_start[r + 1] of the step's flat token axis,
                      at positions seq_lens[r] - num_queries .. seq_lens[r] of its sequence

A query sees the keys at its own position and before (causal by absolute position). Segments list
the KV that consecutive rows share:

    tokens 0        512       700
    row 0  |---------|---------|...     segments (token_start, token_end, row_start, row_end):
    row 1  |---------|---------|...       (0, 512, 0, 3)
    row 2  |---------|.....               (512, 700, 0, 2)

Attention over a segment may be computed once for all its rows and merged; each row's own part is
the rest. Every backend converts this to what its kernel needs (`plan_attention`), once for all
layers; the reference ignores segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


def no_segments() -> IntArray:
    """[0, 4]"""
    return np.zeros((0, 4), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """The rows of one step. Every row has at least one query: `1 <= queries <= seq_lens`.

    Segments end before the first query of each of their rows, and those of a row cover its tokens
    from 0 on without a gap; they are given outermost first.
    """

    query_start: IntArray  # [num_rows + 1], ascending from 0
    seq_lens: IntArray  # [num_rows], tokens with KV once this step has stored its own
    page_table: IntArray  # [any, >= max pages of a row] page ids, garbage after a row's last
    table_rows: IntArray  # [num_rows], each row's index in the table
    page_size: int  # token slots a page
    segments: IntArray = field(default_factory=no_segments)  # [S, 4], see above

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_queries(self) -> IntArray:
        """Queries of each row, [num_rows]."""
        return np.diff(self.query_start)

    def own_start(self) -> IntArray:
        """Where each row's own KV begins, after the last segment that it is part of, [num_rows]."""
        start = np.zeros(self.num_rows, dtype=np.int32)
        for _, token_end, row_start, row_end in self.segments.tolist():
            start[row_start:row_end] = token_end
        return start

    def slots(self, row: int, first: int, last: int) -> IntArray:
        """The KV slots of one row's tokens [first, last); slot = page * page_size + offset."""
        pages_of_row: IntArray = self.page_table[self.table_rows[row]]
        if self.page_size == 1:
            return pages_of_row[first:last]
        places = np.arange(first, last, dtype=np.int32)
        pages: IntArray = pages_of_row[places // self.page_size]
        slots: IntArray = pages * np.int32(self.page_size) + places % self.page_size
        return slots

    def padded_slots(self, rows: IntArray, first: IntArray) -> IntArray:
        """The KV slots of the given rows from token `first` [len(rows)] on, [len(rows), longest].

        After a row's end its slot of token `first` is repeated: it may be read and then masked, so
        that a non-finite value in it affects no other row.
        """
        lens = self.seq_lens[rows] - first
        places = np.arange(int(lens.max()), dtype=np.int32)
        return self.slots_of(rows, first[:, None] + np.where(places < lens[:, None], places, 0))

    def slots_of(self, rows: IntArray, tokens: IntArray) -> IntArray:
        """The KV slots of tokens [len(rows), N] of the given rows, in that shape."""
        table_rows = self.table_rows[rows][:, None]
        if self.page_size == 1:
            at: IntArray = self.page_table[table_rows, tokens]
            return at
        pages, offsets = np.divmod(tokens, np.int32(self.page_size))
        slots: IntArray = self.page_table[table_rows, pages] * np.int32(self.page_size) + offsets
        return slots
